"""Interval arithmetic, the only one: for simulated, measured and traced times alike.

Times have any unit; whole numbers stay whole, so nanoseconds are exact.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import chain
from operator import itemgetter

Interval = tuple[float, float]
Intervals = list[Interval]
"""Disjoint intervals in order; no two touch."""
_NEVER = (float("inf"), float("inf"))


def union(intervals: Iterable[Interval]) -> Intervals:
    """Return disjoint sorted intervals that cover the same points.

    >>> union([(3, 4), (0, 1), (1, 2)])
    [(0, 2), (3, 4)]
    """
    merged: Intervals = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Return the total length of disjoint intervals."""
    return sum((end - start for start, end in intervals), 0.0)


def intersection(a: Intervals, b: Intervals) -> Intervals:
    """Return the points of both.

    >>> intersection([(0, 2), (3, 6)], [(1, 4)])
    [(1, 2), (3, 4)]
    """
    found: Intervals = []
    rest = iter(b)
    since, until = next(rest, _NEVER)
    for start, end in a:
        while since < end:
            if until > start:
                found.append((max(start, since), min(end, until)))
            if until > end:
                break
            since, until = next(rest, _NEVER)
    return found


def difference(a: Intervals, b: Intervals) -> Intervals:
    """Return the points of ``a`` outside ``b``.

    >>> difference([(0, 6)], [(1, 2), (4, 9)])
    [(0, 1), (2, 4)]
    """
    edges = [float("-inf"), *chain.from_iterable(b), float("inf")]
    return intersection(a, list(zip(edges[::2], edges[1::2], strict=True)))


def clipped(intervals: Intervals, start: float, end: float) -> Intervals:
    """Return the part from ``start`` to ``end``; it takes no time for those outside.

    >>> clipped([(0, 2), (3, 6), (8, 9)], 1, 5)
    [(1, 2), (3, 5)]
    """
    first = bisect_right(intervals, start, key=itemgetter(1))
    last = bisect_left(intervals, end, key=itemgetter(0))
    return [(max(since, start), min(until, end)) for since, until in intervals[first:last]]


def common(one: Interval, other: Interval) -> float:
    """Return the length of what two intervals have in common."""
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))
