"""Floor ``schedule``: pipeline schedules as data. Pure Python, no torch."""

from overlap1f1b.schedule.action import Action, Kind, Pair, Slot, actions_of, parse_slot, peaks_of
from overlap1f1b.schedule.generators.build import (
    DEFAULT_CHUNKS,
    DEFAULT_EXTRA_WARMUP,
    DEFAULT_PROGRAM,
    SCHEDULES,
    build_schedule,
    schedule_of,
)
from overlap1f1b.schedule.generators.found import AUTO, SEARCH_SECONDS, auto, check_search
from overlap1f1b.schedule.generators.interleaved import (
    combined_1f1b,
    interleaved_1f1b,
    one_f_one_b,
    zb_h1,
    zb_h2,
)
from overlap1f1b.schedule.generators.plain import afab, forward_only, forwards_of, one_by_one, sequential
from overlap1f1b.schedule.generators.two_stages import dualpipe, dualpipev, zb_v
from overlap1f1b.schedule.placement import Placement
from overlap1f1b.schedule.program import Program

__all__ = [
    "AUTO",
    "DEFAULT_CHUNKS",
    "DEFAULT_EXTRA_WARMUP",
    "DEFAULT_PROGRAM",
    "SCHEDULES",
    "SEARCH_SECONDS",
    "Action",
    "Kind",
    "Pair",
    "Placement",
    "Program",
    "Slot",
    "actions_of",
    "afab",
    "auto",
    "build_schedule",
    "check_search",
    "combined_1f1b",
    "dualpipe",
    "dualpipev",
    "forward_only",
    "forwards_of",
    "interleaved_1f1b",
    "one_by_one",
    "one_f_one_b",
    "parse_slot",
    "peaks_of",
    "schedule_of",
    "sequential",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
