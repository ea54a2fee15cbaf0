"""The registry of schedules, and programs by their names."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Any

from overlap1f1b.schedule.generators.interleaved import ZBH1, ZBH2, Combined1F1B, Interleaved1F1B, OneFOneB
from overlap1f1b.schedule.generators.options import Schedule
from overlap1f1b.schedule.generators.search import AUTO, Auto
from overlap1f1b.schedule.generators.sequences import Afab, Sequential, forwards_of
from overlap1f1b.schedule.generators.two_stages import ZBV, DualPipe, DualPipeV
from overlap1f1b.schedule.program import Program
from overlap1f1b.schedule.values import check_size, checked

BY_NAME: Mapping[str, type[Schedule]] = MappingProxyType(
    {
        "sequential": Sequential,
        "combined_1f1b": Combined1F1B,
        "afab": Afab,
        "1f1b": OneFOneB,
        "interleaved_1f1b": Interleaved1F1B,
        "zb_h1": ZBH1,
        "zb_h2": ZBH2,
        "zb_v": ZBV,
        "dualpipe": DualPipe,
        "dualpipev": DualPipeV,
        AUTO: Auto,
    }
)
"""Every schedule; a new one is its class and a line here."""

SCHEDULES = tuple(name for name in BY_NAME if name != AUTO)
"""Names of the schedules whose order of actions is fixed."""
OPTIONS = tuple(dict.fromkeys(field.name for name in SCHEDULES for field in fields(BY_NAME[name])))
"""All of their options."""
DEFAULT_CHUNKS = f"1; 2 for {' and '.join(name for name in SCHEDULES if BY_NAME[name].fixed_chunks == 2)}"
"""The default number of chunks in words, for the help of a command."""
DEFAULT_PROGRAM = "combined_1f1b"
MOST_ACTIONS = 5_000_000
"""Largest number of forwards and backwards of a program: made in some seconds, simulated in two minutes."""
EXTRA_WARMUP = (0, 1, 2)
"""Extra warm-ups that a search tries."""


def schedule_of(name: str) -> type[Schedule]:
    """Return the class of a schedule by its name, in capital letters or not; ValueError if it is unknown."""
    known = BY_NAME.get(name.lower() if isinstance(name, str) else "")
    if known is None:
        nearest = "".join(f"; nearest: {found}" for found in get_close_matches(str(name).lower(), SCHEDULES, 1))
        raise ValueError(f"unknown schedule {name!r}; allowed: {', '.join(BY_NAME)}{nearest}")
    return known


def variants(
    schedules: Sequence[str] = SCHEDULES, *, chunks: Sequence[int], extra_warmup: Sequence[int] = EXTRA_WARMUP
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and options of every combination that the schedules accept.

    A schedule without an option appears at most once for it.

    >>> list(variants(["zb_h1", "zb_v"], chunks=[1, 2]))
    [('zb_h1', {'chunks': 1}), ('zb_h1', {'chunks': 2}), ('zb_v', {'chunks': 2})]
    """
    for name in schedules:
        schedule = schedule_of(name)
        for v, extra in product(chunks, extra_warmup):
            options: dict[str, Any] = {"chunks": v} | (
                {"extra_warmup": extra} if schedule.takes("extra_warmup") else {}
            )
            if (schedule.takes("chunks") or v == schedule.fixed_chunks) and (extra == 0 or "extra_warmup" in options):
                yield name, options


@checked
def build_schedule(
    name: str, *, ranks: int = 1, microbatches: int, forward_only: bool = False, **options: float | None
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
        forward_only: The forwards alone, in the schedule's order, for evaluation.
        options: Options of the schedule, the fields of its class in ``BY_NAME``: any of ``chunks``, ``extra_warmup``
            and ``group_size``, see :class:`~overlap1f1b.schedule.generators.options.Schedule`; of ``auto`` ``chunks``,
            ``peak_activations`` and ``seconds``, see :func:`~overlap1f1b.schedule.auto`. None is the default.

    Raises:
        ValueError: The name or an option is unknown, or the combination is impossible; the message has the numbers and
            the allowed values.
    """
    schedule = schedule_of(name)
    for what, size in (("ranks", ranks), ("microbatches", microbatches)):
        check_size(what, size)
    own: dict[str, float] = {}
    for option, value in options.items():
        if schedule.takes(option):
            own |= {} if value is None else {option: value}
        elif value not in (None, only := {"chunks": schedule.fixed_chunks, "extra_warmup": 0}.get(option)):
            allowed = only if only is not None else ", ".join(field.name for field in fields(schedule)) or "no option"
            owners = ", ".join(other for other, of in BY_NAME.items() if of.takes(option))
            belongs = f" ({option} is an option of {owners})" if owners else ""
            raise ValueError(f"{option}={value!r} with {name}; allowed: {allowed}{belongs}")
    made = schedule(**own)
    chunks = getattr(made, "chunks", made.fixed_chunks)
    if (count := 2 * int(ranks) * int(chunks) * int(microbatches)) > MOST_ACTIONS:
        sizes = f"{name} with {ranks=}, {microbatches=}, {chunks=}"
        raise ValueError(f"{sizes} has about {count} actions; allowed: at most {MOST_ACTIONS}")
    build = partial(made.program, ranks=ranks)
    program = build(microbatches)
    program = replace(program, build=program.build or build)
    if forward_only and name == AUTO:
        raise ValueError(f"forward_only with {AUTO}; allowed: none, since an order is found for a whole step")
    return forwards_of(program) if forward_only else program
