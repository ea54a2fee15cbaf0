"""Schedules by name: their options, and the check of sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from inspect import signature
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
    """A schedule: the function that makes its program from microbatches, ranks and the options that it has as keywords.

    Args:
        build: The function; its options are any of ``chunks``, ``extra_warmup`` and ``group_size``.
        fixed_chunks: Stages a rank of a schedule without the option ``chunks``.
    """

    build: Callable[..., Program]
    fixed_chunks: int = 1

    def takes(self, option: str) -> bool:
        """Return whether the schedule has an option."""
        return option in signature(self.build).parameters

    @property
    def chunks(self) -> int | None:
        """Stages a rank, if they are fixed; None for any number."""
        return None if self.takes("chunks") else self.fixed_chunks


BY_NAME: Mapping[str, Schedule] = MappingProxyType(
    {
        "sequential": Schedule(sequential),
        "combined_1f1b": Schedule(combined_1f1b),
        "afab": Schedule(afab),
        "1f1b": Schedule(one_f_one_b),
        "interleaved_1f1b": Schedule(interleaved_1f1b),
        "zb_h1": Schedule(zb_h1),
        "zb_h2": Schedule(zb_h2),
        "zb_v": Schedule(zb_v, fixed_chunks=2),
        "dualpipe": Schedule(dualpipe),
        "dualpipev": Schedule(dualpipev, fixed_chunks=2),
    }
)
"""Every schedule with a fixed order; a new one is its generator and a line here."""

SCHEDULES = tuple(BY_NAME)
"""Names of the schedules whose order of actions is fixed."""
DEFAULT_CHUNKS = f"1; 2 for {' and '.join(name for name, schedule in BY_NAME.items() if schedule.chunks == 2)}"
"""The default number of chunks in words, for the help of a command."""
DEFAULT_PROGRAM = "combined_1f1b"


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
            over to an order that it finds for them. See :func:`~overlap1f1b.found_orders`.
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
    stages = schedule.fixed_chunks if chunks is None else chunks
    for what, value in (("ranks", ranks), ("microbatches", microbatches), ("chunks", stages)):
        check_size(what, value)
    if schedule.chunks not in (None, stages):
        why = f"chunks belong to {_taking('chunks')}" if schedule.chunks == 1 else "a V has two chunks a rank"
        raise ValueError(f"chunks={chunks} with {name}; allowed: {schedule.chunks} ({why})")
    if extra_warmup is not None:
        check_size("extra_warmup", extra_warmup, 0)
    if extra_warmup and not schedule.takes("extra_warmup"):
        raise ValueError(
            f"extra_warmup={extra_warmup} with {name}; allowed: 0 (it belongs to {_taking('extra_warmup')})"
        )
    if group_size is not None:
        if not schedule.takes("group_size"):
            raise ValueError(
                f"group_size={group_size} with {name}; allowed: none (it belongs to {_taking('group_size')})"
            )
        _check_group(ranks, microbatches, group_size)
    given_options = {"chunks": chunks, "extra_warmup": extra_warmup, "group_size": group_size}
    options = {what: value for what, value in given_options.items() if value is not None and schedule.takes(what)}
    program = schedule.build(microbatches=microbatches, ranks=ranks, **options)
    if not forward_only:
        return program
    return forward_only_of(microbatches) if ranks == stages == 1 else forwards_of(program)


def _taking(option: str) -> str:
    return ", ".join(name for name, schedule in BY_NAME.items() if schedule.takes(option))


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


def _check_group(ranks: int, microbatches: int, group_size: int) -> None:
    """Raise ``ValueError`` if a group would be smaller than the pipeline: behind it ranks could wait for each other."""
    check_size("group_size", group_size)
    sizes = range(min(ranks, microbatches), microbatches + 1)
    fitting = [size for size in sizes if not 0 < microbatches % size < ranks]
    if group_size not in fitting:
        closest = min(fitting, key=lambda size: abs(size - group_size))
        allowed = f"{fitting[0]} to {microbatches} with a last group of {ranks} or more, nearest {closest}"
        if len(fitting) == 1:
            allowed = f"{closest}, all in one group"
        raise ValueError(
            f"group_size={group_size} over {ranks} ranks with {microbatches} microbatches; allowed: {allowed}"
        )
