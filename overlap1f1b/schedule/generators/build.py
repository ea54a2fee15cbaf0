"""Schedules by name: their options, and the check of sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import NamedTuple

from overlap1f1b.schedule.generators.found import AUTO, SEARCH_SECONDS, auto
from overlap1f1b.schedule.generators.interleaved import combined_1f1b, interleaved_1f1b, one_f_one_b, zb_h1, zb_h2
from overlap1f1b.schedule.generators.plain import afab, forwards_of, sequential
from overlap1f1b.schedule.generators.plain import forward_only as forward_only_of
from overlap1f1b.schedule.generators.two_stages import dualpipe, dualpipev, zb_v
from overlap1f1b.schedule.placement import Placement
from overlap1f1b.schedule.program import Program
from overlap1f1b.schedule.values import check_size


class Schedule(NamedTuple):
    """A schedule and the options that it takes.

    Args:
        build: Function that makes its program from microbatches and ranks and the options that the schedule takes.
        chunks: Stages a rank, if they are fixed; None for any number.
        extra_warmup: Whether additional forwards may come before the first backward.
        group_size: Whether the size of groups of microbatches can be chosen.
    """

    build: Callable[..., Program]
    chunks: int | None = 1
    extra_warmup: bool = False
    group_size: bool = False


BY_NAME: Mapping[str, Schedule] = MappingProxyType(
    {
        "sequential": Schedule(sequential, chunks=None),
        "combined_1f1b": Schedule(combined_1f1b, chunks=None, extra_warmup=True, group_size=True),
        "afab": Schedule(afab, chunks=None),
        "1f1b": Schedule(one_f_one_b, extra_warmup=True),
        "interleaved_1f1b": Schedule(interleaved_1f1b, chunks=None, extra_warmup=True, group_size=True),
        "zb_h1": Schedule(zb_h1, chunks=None, group_size=True),
        "zb_h2": Schedule(zb_h2),
        "zb_v": Schedule(zb_v, chunks=2),
        "dualpipe": Schedule(dualpipe),
        "dualpipev": Schedule(dualpipev, chunks=2),
    }
)
"""Every schedule with a fixed order: the only place that says which options it takes."""

SCHEDULES = tuple(BY_NAME)
"""Names of the schedules whose order of actions is fixed."""
DEFAULT_CHUNKS = f"1; 2 for {' and '.join(name for name, takes in BY_NAME.items() if takes.chunks == 2)}"
"""The default number of chunks in words, for the help of a command."""
DEFAULT_PROGRAM = "combined_1f1b"
DEFAULT_EXTRA_WARMUP = 1
"""Extra warm-up of ``combined_1f1b`` with one chunk on one rank; over several the warm-up is long enough without it."""


def schedule_of(name: str) -> Schedule:
    """Return a schedule by its name.

    Raises:
        ValueError: The name is unknown.
    """
    if name not in SCHEDULES:
        nearest = "".join(f", nearest {found}" for found in get_close_matches(str(name), SCHEDULES, 1))
        raise ValueError(f"unknown schedule {name!r}; allowed: {', '.join((*SCHEDULES, AUTO))}{nearest}")
    return BY_NAME[name]


def build_schedule(
    name: str,
    *,
    ranks: int = 1,
    microbatches: int,
    chunks: int | None = None,
    extra_warmup: int | None = None,
    group_size: int | None = None,
    forward_only: bool = False,
    peak_activations: float | None = None,
    seconds: float | None = None,
) -> Program:
    """Return the Program of a schedule.

    >>> build_schedule("combined_1f1b", microbatches=4, extra_warmup=1).peak_activations
    (3,)
    >>> print(build_schedule("1f1b", ranks=2, microbatches=3).draw())
    rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
    rank 1: 1F0 1B0 1F1 1B1 1F2 1B2

    Args:
        name: One of ``SCHEDULES``, or ``"auto"``: an Engine measures costs in the order of ``sequential`` and then goes
            over to an order that it finds for them. See :func:`~overlap1f1b.synthesize`.
        ranks: Pipeline ranks, P.
        microbatches: Microbatches of the step, M, at least 1; over both pipes for ``dualpipe``.
        chunks: Stages a rank, v, for ``sequential``, ``afab``, ``interleaved_1f1b``, ``combined_1f1b`` and ``zb_h1``;
            by default 1. ``zb_v`` and ``dualpipev`` always have 2, the others 1. ``auto`` takes any number; with more
            than one the stages are placed in a V.
        extra_warmup: Additional forwards before the first backward, which cost one more activation each, for ``1f1b``,
            ``interleaved_1f1b`` and ``combined_1f1b``. By default 0; for ``combined_1f1b`` with one chunk on one
            rank 1, which with three open actions is the fastest.
        group_size: Microbatches that pass one chunk before a rank turns to the next one, G, for ``interleaved_1f1b``,
            ``combined_1f1b`` and ``zb_h1``: P ≤ G ≤ M, and M mod G is 0 or at least P; by default M is divided into
            ⌊M/P⌋ groups that are as equal as possible.
        forward_only: The forwards alone, in the schedule's order, for evaluation.
        peak_activations: For ``auto``, the limit of live activations on any rank; the unit is a rank's whole share of
            the model for one microbatch. By default twice the number of ranks, at least 3.
        seconds: For ``auto``, the size of the search, about its time on one free core; by default 10.

    Raises:
        ValueError: The name is unknown or the combination is impossible; the message has the numbers and the allowed
            values.
    """
    if name == AUTO:
        only = {"extra_warmup": extra_warmup, "group_size": group_size, "forward_only": forward_only or None}
        return _auto(ranks, microbatches, 1 if chunks is None else chunks, peak_activations, seconds, only)
    schedule = schedule_of(name)
    for what, given in (("peak_activations", peak_activations), ("seconds", seconds)):
        if given is not None:
            raise ValueError(f"{what}={given!r} with {name}; allowed: none (it belongs to {AUTO})")
    if chunks is None:
        chunks = schedule.chunks or 1
    for what, value in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        check_size(what, value)
    _check_options(name, schedule, chunks, extra_warmup, group_size)
    _check_sizes(name, ranks, microbatches, group_size)
    if forward_only and ranks == chunks == 1:
        return forward_only_of(microbatches)
    if extra_warmup is None:
        extra_warmup = DEFAULT_EXTRA_WARMUP if name == "combined_1f1b" and ranks == chunks == 1 else 0
    options: dict[str, int | None] = {}
    if schedule.chunks is None:
        options["chunks"] = chunks
    if schedule.extra_warmup:
        options["extra_warmup"] = extra_warmup
    if schedule.group_size:
        options["group_size"] = group_size
    program = schedule.build(microbatches=microbatches, ranks=ranks, **options)
    return forwards_of(program) if forward_only else program


def _auto(
    ranks: int,
    microbatches: int,
    chunks: int,
    peak_activations: float | None,
    seconds: float | None,
    refused: Mapping[str, object],
) -> Program:
    for what, given in refused.items():
        if given is not None:
            raise ValueError(f"{what}={given!r} with {AUTO}; allowed: none, since an order is found for a whole step")
    check_size("microbatches", microbatches)
    placement = Placement.loop(ranks) if chunks == 1 else Placement.v(ranks, chunks)
    return auto(microbatches, placement, peak_activations, SEARCH_SECONDS if seconds is None else seconds)


def _check_options(
    name: str, schedule: Schedule, chunks: int, extra_warmup: int | None, group_size: int | None
) -> None:
    if schedule.chunks == 2 and chunks != 2:
        raise ValueError(f"chunks={chunks} with {name}; allowed: 2 (a V has two chunks a rank)")
    if schedule.chunks == 1 and chunks > 1:
        belong = ", ".join(other for other, takes in BY_NAME.items() if takes.chunks is None)
        raise ValueError(f"chunks={chunks} with {name}; allowed: 1 (chunks belong to {belong})")
    if extra_warmup is not None:
        check_size("extra_warmup", extra_warmup, 0)
    if extra_warmup and not schedule.extra_warmup:
        belongs = ", ".join(other for other, takes in BY_NAME.items() if takes.extra_warmup)
        raise ValueError(f"extra_warmup={extra_warmup} with {name}; allowed: 0 (it belongs to {belongs})")
    if group_size is not None and not schedule.group_size:
        belongs = ", ".join(other for other, takes in BY_NAME.items() if takes.group_size)
        raise ValueError(f"group_size={group_size} with {name}; allowed: none (it belongs to {belongs})")


def _check_sizes(name: str, ranks: int, microbatches: int, group_size: int | None) -> None:
    if group_size is not None:
        check_size("group_size", group_size)
        fitting = [
            size for size in range(min(ranks, microbatches), microbatches + 1) if _fits(size, ranks, microbatches)
        ]
        if group_size not in fitting:
            closest = min(fitting, key=lambda size: abs(size - group_size))
            allowed = f"{fitting[0]} to {microbatches} with a last group of {ranks} or more, nearest {closest}"
            if len(fitting) == 1:
                allowed = f"{closest}, all in one group"
            raise ValueError(
                f"group_size={group_size} over {ranks} ranks with {microbatches} microbatches; allowed: {allowed}"
            )
    if name == "dualpipe" and ranks % 2:
        nearest = f"{ranks - 1} or {ranks + 1}" if ranks > 1 else "2"
        raise ValueError(f"dualpipe over {ranks} ranks; allowed: an even number, nearest {nearest}")
    if name == "dualpipe" and (microbatches % 2 or microbatches < 2 * ranks):
        nearest = str(2 * ranks) if microbatches < 2 * ranks else f"{microbatches - 1} or {microbatches + 1}"
        raise ValueError(
            f"dualpipe over {ranks} ranks with {microbatches} microbatches; "
            f"allowed: an even number from {2 * ranks} on, nearest {nearest}"
        )
    if name == "dualpipev" and microbatches < 2 * ranks:
        raise ValueError(f"dualpipev over {ranks} ranks with {microbatches} microbatches; allowed: {2 * ranks} or more")


def _fits(group_size: int, ranks: int, microbatches: int) -> bool:
    """Return whether no group is smaller than the pipeline; after a smaller one ranks could wait for each other."""
    left = microbatches % group_size
    return left == 0 or left >= ranks
