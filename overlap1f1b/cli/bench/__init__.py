"""``overlap1f1b bench``: what each program costs on one workload."""
