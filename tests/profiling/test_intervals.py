"""Interval arithmetic: exact, and the same as that of simulated timelines."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap1f1b.profiling.intervals import Intervals, clipped, covered, difference, intersection, joined, length, union
from overlap1f1b.simulation import timeline as simulated

SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda span: (span[0], span[0] + span[1])))


def of(*spans: tuple[int, int]) -> Intervals:
    columns = np.array(spans, np.int64).reshape(-1, 2)
    return union(columns[:, 0], columns[:, 1])


@pytest.mark.parametrize(
    ("spans", "covers"),
    [
        ([], []),
        ([(3, 3)], []),
        ([(0, 2), (4, 5)], [[0, 2], [4, 5]]),
        ([(4, 5), (0, 2)], [[0, 2], [4, 5]]),
        ([(0, 9), (2, 3), (4, 9)], [[0, 9]]),
        ([(0, 2), (2, 4), (4, 4)], [[0, 4]]),
        ([(0, 3), (2, 5), (5, 6)], [[0, 6]]),
    ],
)
def test_union(spans: list[tuple[int, int]], covers: list[list[int]]) -> None:
    assert of(*spans).tolist() == covers


@settings(deadline=None)  # other work shares the processors
@given(SPANS, SPANS)
def test_as_that_of_simulated_timelines(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    mine, theirs = of(*a), simulated.union(a)
    assert [tuple(edges) for edges in mine.tolist()] == theirs
    common = intersection(mine, of(*b))
    assert [tuple(edges) for edges in common.tolist()] == simulated.intersection(theirs, simulated.union(b))
    assert length(mine) == simulated.length(theirs)


@settings(deadline=None)  # other work shares the processors
@given(SPANS, SPANS)
def test_every_point_is_where_it_belongs(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    def points(spans: list[tuple[int, int]] | Intervals) -> set[int]:
        return {point for start, end in np.array(spans).reshape(-1, 2).tolist() for point in range(start, end)}

    first, second = of(*a), of(*b)
    assert points(difference(first, second)) == points(a) - points(b)
    assert points(joined(first, second)) == points(a) | points(b)
    assert points(clipped(first, 5, 20)) == points(a) & set(range(5, 20))
    columns = np.array(a, np.int64).reshape(-1, 2)
    within = covered(columns[:, 0], columns[:, 1], second)
    assert within.tolist() == [len(points([span]) & points(b)) for span in a]
