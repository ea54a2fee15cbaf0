"""``overlap1f1b profile``: what a training or a benchmark does, with a profiler beside it."""
