"""Schedules as pure functions of their sizes, each with its picture."""

from __future__ import annotations

from overlap1f1b.schedule.action import Action, Kind, Pair, Step
from overlap1f1b.schedule.program import Program


def sequential(microbatches: int) -> Program:
    """Each microbatch forward, then backward: the baseline of every comparison, one activation alive.

    ::

        F0 B0 F1 B1 F2 B2
    """
    steps = [Action(kind, 0, m) for m in range(microbatches) for kind in (Kind.F, Kind.B)]
    return Program("sequential", microbatches, (tuple(steps),), (1,))


def combined_1f1b(microbatches: int, extra_warmup: int = 0) -> Program:
    """Each backward paired with the forward of a later microbatch, on one stage (Megatron-Core's merged step).

    ::

        extra_warmup=0:  F0 B0‖F1 B1‖F2 B2
        extra_warmup=1:  F0 F1 B0‖F2 B1‖F3 B2 B3

    With ``w = 1 + extra_warmup`` forwards before the first backward, ``w + 1`` microbatches are alive at most: each
    extra warm-up costs one more activation and gives the exchange one more action to hide behind.
    """
    warmup = min(1 + extra_warmup, microbatches)
    steps: list[Step] = [Action(Kind.F, 0, m) for m in range(warmup)]
    steps += [
        Pair(Action(Kind.F, 0, m + warmup), Action(Kind.B, 0, m)) if m + warmup < microbatches else Action(Kind.B, 0, m)
        for m in range(microbatches)
    ]
    name = "combined_1f1b" if extra_warmup == 0 else f"combined_1f1b+{extra_warmup}"
    return Program(name, microbatches, (tuple(steps),), (min(warmup + 1, microbatches),))


def forward_only(microbatches: int) -> Program:
    """Forwards alone, for evaluation.

    ::

        F0 F1 F2
    """
    steps = tuple(Action(Kind.F, 0, m) for m in range(microbatches))
    return Program("forward_only", microbatches, (steps,), (microbatches,))


SCHEDULES = ("sequential", "combined_1f1b")
DEFAULT_PROGRAM = "combined_1f1b"
DEFAULT_EXTRA_WARMUP = 1


def build_schedule(name: str, *, ranks: int = 1, microbatches: int, extra_warmup: int | None = None) -> Program:
    """The Program of a schedule.

    >>> build_schedule("combined_1f1b", microbatches=4, extra_warmup=1).peak_activations
    (3,)

    Args:
        name: One of ``SCHEDULES``.
        ranks: Pipeline ranks; the schedules here are those of one rank.
        microbatches: M, at least 1.
        extra_warmup: Forwards beyond the first before the first backward, for ``combined_1f1b``; by default 1, which
            with three open actions is the fastest.

    Raises:
        ValueError: An unknown name or an impossible combination, with the numbers and what is allowed.
    """
    if name not in SCHEDULES:
        raise ValueError(f"unknown program {name!r}; allowed: {', '.join(SCHEDULES)}")
    if ranks != 1:
        raise ValueError(f"{name} over {ranks} pipeline ranks is not available; allowed: 1")
    if microbatches < 1:
        raise ValueError(f"microbatches={microbatches}; allowed: 1 or more")
    if extra_warmup is not None and extra_warmup < 0:
        raise ValueError(f"extra_warmup={extra_warmup}; allowed: 0 or more")
    if name == "sequential":
        if extra_warmup:
            raise ValueError(f"extra_warmup={extra_warmup} with sequential; allowed: 0 (it belongs to combined_1f1b)")
        return sequential(microbatches)
    return combined_1f1b(microbatches, DEFAULT_EXTRA_WARMUP if extra_warmup is None else extra_warmup)
