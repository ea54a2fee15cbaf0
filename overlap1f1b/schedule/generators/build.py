"""Schedules by name, and what is refused."""

from __future__ import annotations

from difflib import get_close_matches

from overlap1f1b.schedule.generators.all_forward import afab
from overlap1f1b.schedule.generators.bidirectional import dualpipe, dualpipev
from overlap1f1b.schedule.generators.combined import combined_1f1b
from overlap1f1b.schedule.generators.interleaved import interleaved_1f1b, one_f_one_b
from overlap1f1b.schedule.generators.plain import forward_only as forward_only_of
from overlap1f1b.schedule.generators.plain import forwards_of, sequential
from overlap1f1b.schedule.generators.zero_bubble import zb_h1, zb_h2
from overlap1f1b.schedule.generators.zero_bubble_v import zb_v
from overlap1f1b.schedule.program import Program
from overlap1f1b.schedule.sizes import check_size

SCHEDULES = (
    "sequential",
    "combined_1f1b",
    "afab",
    "1f1b",
    "interleaved_1f1b",
    "zb_h1",
    "zb_h2",
    "zb_v",
    "dualpipe",
    "dualpipev",
)
DEFAULT_PROGRAM = "combined_1f1b"
DEFAULT_EXTRA_WARMUP = 1
"""Of ``combined_1f1b`` on one rank; over several ranks the warm-up is long enough without."""

_CHUNKED = ("sequential", "afab", "interleaved_1f1b", "combined_1f1b", "zb_h1")
_GROUPED = ("interleaved_1f1b", "combined_1f1b", "zb_h1")
_WARMED = ("combined_1f1b", "1f1b", "interleaved_1f1b")
_V = ("zb_v", "dualpipev")


def build_schedule(
    name: str,
    *,
    ranks: int = 1,
    microbatches: int,
    chunks: int | None = None,
    extra_warmup: int | None = None,
    group_size: int | None = None,
    forward_only: bool = False,
) -> Program:
    """The Program of a schedule.

    >>> build_schedule("combined_1f1b", microbatches=4, extra_warmup=1).peak_activations
    (3,)
    >>> print(build_schedule("1f1b", ranks=2, microbatches=3).draw())
    rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
    rank 1: 1F0 1B0 1F1 1B1 1F2 1B2

    Args:
        name: One of ``SCHEDULES``.
        ranks: Pipeline ranks, P.
        microbatches: Microbatches of the step, M, at least 1; over both pipes for ``dualpipe``.
        chunks: Stages a rank, v, for ``sequential``, ``afab``, ``interleaved_1f1b``, ``combined_1f1b`` and ``zb_h1``;
            by default 1. ``zb_v`` and ``dualpipev`` always have 2, the others 1.
        extra_warmup: Further forwards before the first backward, each for one more activation, for ``1f1b``,
            ``interleaved_1f1b`` and ``combined_1f1b``. By default 0; for ``combined_1f1b`` on one rank 1, which with
            three open actions is the fastest.
        group_size: Microbatches that pass one chunk before a rank turns to the next one, G, for ``interleaved_1f1b``,
            ``combined_1f1b`` and ``zb_h1``: P ≤ G ≤ M, M mod G 0 or at least P; by default
            M in ⌊M/P⌋ groups as equal as can be.
        forward_only: The forwards alone, in the schedule's order, for evaluation.

    Raises:
        ValueError: An unknown name or an impossible combination, with the numbers and what is allowed.
    """
    if name not in SCHEDULES:
        nearest = "".join(f", nearest {found}" for found in get_close_matches(str(name), SCHEDULES, 1))
        raise ValueError(f"unknown program {name!r}; allowed: {', '.join(SCHEDULES)}{nearest}")
    if chunks is None:
        chunks = 2 if name in _V else 1
    for what, value in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        check_size(what, value)
    _check_options(name, chunks, extra_warmup, group_size)
    _check_sizes(name, ranks, microbatches, group_size)
    if forward_only and ranks == chunks == 1:
        return forward_only_of(microbatches)
    if extra_warmup is None:
        extra_warmup = DEFAULT_EXTRA_WARMUP if name == "combined_1f1b" and ranks == chunks == 1 else 0
    program = _build(name, ranks, microbatches, chunks, extra_warmup, group_size)
    return forwards_of(program) if forward_only else program


def _build(name: str, ranks: int, microbatches: int, chunks: int, extra_warmup: int, group_size: int | None) -> Program:
    build = {
        "sequential": lambda: sequential(microbatches, ranks, chunks),
        "afab": lambda: afab(microbatches, ranks, chunks),
        "1f1b": lambda: one_f_one_b(microbatches, ranks, extra_warmup),
        "interleaved_1f1b": lambda: interleaved_1f1b(microbatches, ranks, chunks, extra_warmup, group_size),
        "combined_1f1b": lambda: combined_1f1b(microbatches, extra_warmup, ranks, chunks, group_size),
        "zb_h1": lambda: zb_h1(microbatches, ranks, chunks, group_size),
        "zb_h2": lambda: zb_h2(microbatches, ranks),
        "zb_v": lambda: zb_v(microbatches, ranks),
        "dualpipe": lambda: dualpipe(microbatches, ranks),
        "dualpipev": lambda: dualpipev(microbatches, ranks),
    }
    return build[name]()


def _check_options(name: str, chunks: int, extra_warmup: int | None, group_size: int | None) -> None:
    if name in _V and chunks != 2:
        raise ValueError(f"chunks={chunks} with {name}; allowed: 2 (a V has two chunks a rank)")
    if name not in (*_CHUNKED, *_V) and chunks > 1:
        raise ValueError(f"chunks={chunks} with {name}; allowed: 1 (chunks belong to {', '.join(_CHUNKED)})")
    if extra_warmup is not None:
        check_size("extra_warmup", extra_warmup, 0)
    if extra_warmup and name not in _WARMED:
        raise ValueError(f"extra_warmup={extra_warmup} with {name}; allowed: 0 (it belongs to {', '.join(_WARMED)})")
    if group_size is not None and name not in _GROUPED:
        raise ValueError(f"group_size={group_size} with {name}; allowed: none (it belongs to {', '.join(_GROUPED)})")


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
    """Whether no group is smaller than the pipeline: ranks could wait for each other behind it."""
    left = microbatches % group_size
    return left == 0 or left >= ranks
