"""Floor ``cli``: the verbs of the command line."""
