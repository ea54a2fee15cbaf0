"""``overlap1f1b train``: train a byte-level model or one of transformers."""
