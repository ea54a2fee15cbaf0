"""``overlap1f1b doctor``: what on this machine could keep exchanges from being hidden."""
