"""Programs on one rank, in short."""

from overlap1f1b.schedule import Program, build_schedule


def sequential(microbatches: int) -> Program:
    return build_schedule("sequential", microbatches=microbatches)


def forward_only(microbatches: int) -> Program:
    return build_schedule("sequential", microbatches=microbatches, forward_only=True)


def combined_1f1b(microbatches: int, extra_warmup: int | None = None) -> Program:
    return build_schedule("combined_1f1b", microbatches=microbatches, extra_warmup=extra_warmup)
