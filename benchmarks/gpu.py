"""What one GPU of 80 GB or more does with this library, in one command and about nine minutes.

    python benchmarks/gpu.py                              # all sections, results in benchmarks/results
    python benchmarks/gpu.py --sections checks,kernels --budget 120
    python benchmarks/gpu.py --quick                      # fewer rounds
    python benchmarks/gpu.py --device cpu --tiny          # that it runs at all: its figures mean nothing

Needs torch, triton, einops and greenlet, and no installation: it runs from the checkout. Ceilings come first, then all
compilers, counted apart, then checks. A section that fails is noted with its error, and the others still run; what did
not fit the time is said. With two or more GPUs NCCL is measured, too. docs/gpu.md says how.
"""

import os
import sys
from pathlib import Path

# Before CUDA starts: matrix products that give the same bits every time, on whatever streams they run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu_bench.run import main

if __name__ == "__main__":
    main()
