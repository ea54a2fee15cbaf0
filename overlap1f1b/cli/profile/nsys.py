"""Ranks under NVIDIA Nsight Systems."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

INSIDE = "OVERLAP1F1B_NSYS"  # set in a rank that runs under nsys


def check_nsys() -> None:
    """Raises ``ValueError`` where nsys is not there."""
    if shutil.which("nsys") is None:
        raise ValueError(
            "--nsys: nsys is not on PATH; allowed: NVIDIA Nsight Systems installed, or torch.profiler without --nsys"
        )


def nsys_line(folder: Path, argv: Sequence[str], rank: str = "%q{RANK}") -> list[str]:
    """The command of one rank: nsys records between the calls that open and close its capture range.

    Args:
        folder: For ``rank<N>.nsys-rep`` and the same as ``.sqlite``, which ``report`` reads.
        argv: Of overlap1f1b.
        rank: By default what nsys itself puts in its place.
    """
    return [
        "nsys",
        "profile",
        "--trace=cuda,nvtx",
        "--sample=none",
        "--cpuctxsw=none",
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop",
        "--export=sqlite",
        "--force-overwrite=true",
        f"--output={folder}/rank{rank}",
        sys.executable,
        "-m",
        "overlap1f1b",
        *argv,
    ]


def enter_nsys(folder: Path, argv: Sequence[str], rank: str) -> NoReturn:
    """Replaces this process, one rank, by nsys, which runs the same once more."""
    folder.mkdir(parents=True, exist_ok=True)
    line = nsys_line(folder, argv, rank)
    if rank == "0":
        sys.stderr.write(f"{shlex.join(nsys_line(folder, argv) if 'RANK' in os.environ else line)}\n")
        sys.stderr.flush()
    os.execvpe(line[0], line, {**os.environ, INSIDE: "1"})
