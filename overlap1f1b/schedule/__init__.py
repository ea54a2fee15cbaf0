"""Floor ``schedule``: pipeline schedules as data. Pure Python, no torch."""

from overlap1f1b.schedule.action import Action, Kind, Pair, Slot, actions_of, parse_slot
from overlap1f1b.schedule.generators.interleaved import DEFAULT_EXTRA_WARMUP
from overlap1f1b.schedule.generators.registry import (
    DEFAULT_CHUNKS,
    DEFAULT_PROGRAM,
    EXTRA_WARMUP,
    OPTIONS,
    SCHEDULES,
    build_schedule,
    schedule_of,
    variants,
)
from overlap1f1b.schedule.generators.search import AUTO, SEARCH_SECONDS, auto, check_search
from overlap1f1b.schedule.generators.sequences import forwards_of, one_by_one
from overlap1f1b.schedule.placement import Placement
from overlap1f1b.schedule.program import Program

__all__ = [
    "AUTO",
    "DEFAULT_CHUNKS",
    "DEFAULT_EXTRA_WARMUP",
    "DEFAULT_PROGRAM",
    "EXTRA_WARMUP",
    "OPTIONS",
    "SCHEDULES",
    "SEARCH_SECONDS",
    "Action",
    "Kind",
    "Pair",
    "Placement",
    "Program",
    "Slot",
    "actions_of",
    "auto",
    "build_schedule",
    "check_search",
    "forwards_of",
    "one_by_one",
    "parse_slot",
    "schedule_of",
    "variants",
]
