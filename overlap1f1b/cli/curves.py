"""Losses drawn in text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

LEVELS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """One line of at most ``width`` bars, each the mean of the values that it stands for.

    >>> sparkline([4, 3, 2, 1])
    '█▆▃▁'
    """
    bars = min(width, len(values))
    cuts = [round(i * len(values) / bars) for i in range(bars + 1)] if bars else []
    means = [fmean(values[a:b]) for a, b in pairwise(cuts)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    span = (high - low) or 1.0
    return "".join(LEVELS[round((mean - low) / span * (len(LEVELS) - 1))] for mean in means)


def marks(count: int, most: int = 10) -> list[int]:
    """At most ``most`` evenly spaced positions of ``count``, the first and the last among them.

    >>> marks(100, 4)
    [0, 33, 66, 99]
    """
    points = min(count, most)
    return sorted({round(i * (count - 1) / max(1, points - 1)) for i in range(points)})
