"""Floor ``terminal``: what commands print and write: tables, JSON, progress."""
