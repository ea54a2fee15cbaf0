"""The sections of ``benchmarks/gpu.py``: each measures one thing, and can fail alone."""
