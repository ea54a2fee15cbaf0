"""Floor ``schedule``: pipeline schedules as data. Pure Python, no torch."""

from overlap1f1b.schedule.action import Action, Kind, Pair, Step, actions_of
from overlap1f1b.schedule.checks import check
from overlap1f1b.schedule.generators import (
    DEFAULT_EXTRA_WARMUP,
    DEFAULT_PROGRAM,
    SCHEDULES,
    build_schedule,
    combined_1f1b,
    forward_only,
    sequential,
)
from overlap1f1b.schedule.placement import Placement
from overlap1f1b.schedule.program import Program

__all__ = [
    "DEFAULT_EXTRA_WARMUP",
    "DEFAULT_PROGRAM",
    "SCHEDULES",
    "Action",
    "Kind",
    "Pair",
    "Placement",
    "Program",
    "Step",
    "actions_of",
    "build_schedule",
    "check",
    "combined_1f1b",
    "forward_only",
    "sequential",
]
