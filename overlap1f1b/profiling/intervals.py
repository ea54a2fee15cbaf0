"""Interval arithmetic over columns of a million spans; times are whole nanoseconds, so results are exact.

``simulation.timeline`` has its own on lists of floats, because that floor loads no NumPy.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.int64]
"""One column of times, in nanoseconds."""

Intervals = NDArray[np.int64]
"""Disjoint intervals in order, ``[n, 2]``; no two touch."""

NONE: Intervals = np.empty((0, 2), np.int64)


def union(start: Times, end: Times) -> Intervals:
    """Return the union of spans.

    >>> union(np.array([3, 0, 1]), np.array([4, 1, 2])).tolist()
    [[0, 2], [3, 4]]
    """
    there = end > start
    start, end = start[there], end[there]
    if not len(start):
        return NONE
    order = np.argsort(start, kind="stable")
    start, until = start[order], np.maximum.accumulate(end[order])
    first = np.concatenate(([True], start[1:] > until[:-1]))
    last = np.concatenate((first[1:], [True]))
    return np.stack((start[first], until[last]), axis=1)


def length(intervals: Intervals) -> int:
    """Return the total length of intervals."""
    return int((intervals[:, 1] - intervals[:, 0]).sum())


def intersection(a: Intervals, b: Intervals) -> Intervals:
    """Return the intersection of two unions.

    >>> intersection(np.array([[0, 2], [3, 6]]), np.array([[1, 4]])).tolist()
    [[1, 2], [3, 4]]
    """
    return _swept(a, b, 3)


def difference(a: Intervals, b: Intervals) -> Intervals:
    """Return the part of ``a`` outside ``b``.

    >>> difference(np.array([[0, 6]]), np.array([[1, 2], [4, 9]])).tolist()
    [[0, 1], [2, 4]]
    """
    return _swept(a, b, 1)


def joined(*parts: Intervals) -> Intervals:
    """Return the union of several unions."""
    every = np.concatenate(parts)
    return union(every[:, 0], every[:, 1])


def clipped(intervals: Intervals, start: int, end: int) -> Intervals:
    """Return the part from ``start`` to ``end``."""
    return intersection(intervals, np.array([[start, end]], np.int64)) if end > start else NONE


def covered(start: Times, end: Times, by: Intervals) -> Times:
    """Return how much of each span the intervals cover.

    >>> covered(np.array([0, 5]), np.array([4, 6]), np.array([[1, 2], [3, 9]])).tolist()
    [2, 1]
    """
    return _before(end, by) - _before(start, by)


def _before(times: Times, intervals: Intervals) -> Times:
    """Return the covered time before each of the times."""
    if not len(intervals):
        return np.zeros(len(times), np.int64)
    whole = np.concatenate(([0], np.cumsum(intervals[:, 1] - intervals[:, 0])))
    at = np.searchsorted(intervals[:, 0], times, side="right")  # intervals begun
    current = np.maximum(at - 1, 0)
    over = np.where(at > 0, np.maximum(intervals[current, 1] - times, 0), 0)
    return np.asarray(whole[at] - over)


def _swept(a: Intervals, b: Intervals, wanted: int) -> Intervals:
    """Return the intervals with the sum ``wanted``, where ``a`` counts 1 and ``b`` counts 2."""
    if not len(a) or not len(b):
        return a if wanted == 1 else NONE
    times = np.concatenate((a.ravel(), b.ravel()))
    steps = np.concatenate((np.tile([1, -1], len(a)), np.tile([2, -2], len(b))))
    order = np.argsort(times, kind="stable")
    times, inside = times[order], np.cumsum(steps[order])
    kept = np.flatnonzero((inside[:-1] == wanted) & (times[1:] > times[:-1]))
    return union(times[kept], times[kept + 1])
