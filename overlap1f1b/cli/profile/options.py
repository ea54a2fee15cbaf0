"""What ``overlap1f1b profile`` takes beside the options of what it profiles."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from overlap1f1b.cli.options import BenchOptions, TrainOptions, check_run
from overlap1f1b.cli.output import check_folder


@dataclass(frozen=True)
class ProfileOptions:
    """Profile what train or bench does: is it overlapping, and where not?

    Runs a warm-up and a few steps under a profiler and writes a trace and a record for each rank.

    For example

      overlap1f1b profile train                            # then: overlap1f1b report profile/rank*.trace.json.gz

      overlap1f1b profile bench --wire balanced --compute timed --overlap pairs --out pairs

      overlap1f1b profile train --nsys                     # kernels and NVTX ranges by NVIDIA Nsight Systems

      overlap1f1b profile train --help                     # all options
    """

    out: Path = Path("profile")
    """Folder for the files, a trace and a record for each rank; made if it is not there."""
    profile_warmup: int = 2
    """Steps by the plan before the profile; the two that measure nodes come before them."""
    profile_steps: int = 3
    """Steps in the profile."""
    nsys: bool = False
    """Trace by NVIDIA Nsight Systems, which must be on PATH, instead of torch.profiler; each rank is started under
    nsys profile, whose line is printed."""


@dataclass(frozen=True)
class ProfileTrainOptions(ProfileOptions, TrainOptions):
    """Profile the steps of a training, which is not saved. --compare, --steps and what evaluates have no effect.

    For example

      overlap1f1b profile train

      overlap1f1b profile train --ep 4 --experts 16 --overlap pairs --out pairs

      torchrun --nproc-per-node 4 -m overlap1f1b profile train --ep 4
    """


@dataclass(frozen=True)
class ProfileBenchOptions(ProfileOptions, BenchOptions):
    """Profile one row of a benchmark, that of --schedule and --overlap. --rounds and --peers have no effect.

    For example

      overlap1f1b profile bench --wire balanced --compute timed

      overlap1f1b profile bench --pp 2 --ep 2 --schedule dualpipev --microbatches 8
    """


VERBS = {"train": ProfileTrainOptions, "bench": ProfileBenchOptions}


def check_profile(options: ProfileTrainOptions | ProfileBenchOptions) -> None:
    """Raises ``ValueError`` for what can be known to be wrong before any rank starts."""
    check_run(options)
    if options.profile_steps < 1:
        raise ValueError(f"--profile-steps {options.profile_steps}; allowed: 1 or more")
    if options.profile_warmup < 0:
        raise ValueError(f"--profile-warmup {options.profile_warmup}; allowed: 0 or more")
    check_folder(options.out, "--out")
