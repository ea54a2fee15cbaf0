"""Room ``learn``: what the first steps find out; only this room chooses plans."""
