"""What the link to host memory brings under limits of memory: the same limits with and without it."""

from __future__ import annotations

from typing import Any

from gpu_bench.context import Context
from gpu_bench.memory import Case, limited

LIMITS = 1.3, 1.0, 0.7


def run(context: Context) -> dict[str, Any]:
    """Two rows for each limit."""
    away = {"offload": "auto"} | ({"offload_threshold": 0} if context.tiny else {})
    cases: list[Case] = [(limit, options) for limit in LIMITS for options in ({}, away)]
    return limited(context, cases)
