"""``overlap1f1b bench``: the throughput of every program on one workload."""
