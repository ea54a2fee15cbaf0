"""Schedules as pure functions of their sizes, each with its picture.

:func:`build_schedule` checks sizes and combinations; the functions behind it take them as they are.
"""

from overlap1f1b.schedule.generators.all_forward import afab
from overlap1f1b.schedule.generators.bidirectional import dualpipe, dualpipev
from overlap1f1b.schedule.generators.build import DEFAULT_EXTRA_WARMUP, DEFAULT_PROGRAM, SCHEDULES, build_schedule
from overlap1f1b.schedule.generators.combined import combined_1f1b
from overlap1f1b.schedule.generators.interleaved import groups_of, interleaved_1f1b, one_f_one_b
from overlap1f1b.schedule.generators.plain import forward_only, forwards_of, sequential
from overlap1f1b.schedule.generators.zero_bubble import zb_h1, zb_h2
from overlap1f1b.schedule.generators.zero_bubble_v import zb_v

__all__ = [
    "DEFAULT_EXTRA_WARMUP",
    "DEFAULT_PROGRAM",
    "SCHEDULES",
    "afab",
    "build_schedule",
    "combined_1f1b",
    "dualpipe",
    "dualpipev",
    "forward_only",
    "forwards_of",
    "groups_of",
    "interleaved_1f1b",
    "one_f_one_b",
    "sequential",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
