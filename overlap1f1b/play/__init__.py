"""Room ``play``: what is made with a step, and is gone with it."""
