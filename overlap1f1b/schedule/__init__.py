"""Floor ``schedule``: pipeline schedules as data. Pure Python, no torch."""

from overlap1f1b.schedule.action import Action, Kind, Pair, Slot, actions_of, parse_slot, peaks_of
from overlap1f1b.schedule.checks import check
from overlap1f1b.schedule.generators import (
    DEFAULT_CHUNKS,
    DEFAULT_EXTRA_WARMUP,
    DEFAULT_PROGRAM,
    SCHEDULES,
    afab,
    build_schedule,
    combined_1f1b,
    dualpipe,
    dualpipev,
    forward_only,
    forwards_of,
    groups_of,
    interleaved_1f1b,
    one_f_one_b,
    schedule_of,
    sequential,
    zb_h1,
    zb_h2,
    zb_v,
)
from overlap1f1b.schedule.placement import Placement
from overlap1f1b.schedule.program import Program

__all__ = [
    "DEFAULT_CHUNKS",
    "DEFAULT_EXTRA_WARMUP",
    "DEFAULT_PROGRAM",
    "SCHEDULES",
    "Action",
    "Kind",
    "Pair",
    "Placement",
    "Program",
    "Slot",
    "actions_of",
    "afab",
    "build_schedule",
    "check",
    "combined_1f1b",
    "dualpipe",
    "dualpipev",
    "forward_only",
    "forwards_of",
    "groups_of",
    "interleaved_1f1b",
    "one_f_one_b",
    "parse_slot",
    "peaks_of",
    "schedule_of",
    "sequential",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
