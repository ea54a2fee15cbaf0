"""Interval arithmetic against a raster of unit cells."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from overlap1f1b.plan.intervals import clipped, common, difference, intersection, length, union
from tests.plan.cases import cells

SPANS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=8)


@settings(deadline=None)  # other work shares the processors
@given(SPANS, SPANS)
def test_every_cell_is_where_it_belongs(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    first, second = union(a), union(b)
    assert cells(first) == cells(a)
    for found, expected in (
        (intersection(first, second), cells(a) & cells(b)),
        (intersection(second, first), cells(a) & cells(b)),
        (difference(first, second), cells(a) - cells(b)),
        (clipped(first, 5, 12), cells(a) & set(range(5, 12))),
        (first, cells(a)),
    ):
        assert cells(found) == expected
        assert length(found) == len(expected)
        assert all(start < end for start, end in found)
        assert all(before[1] < after[0] for before, after in pairwise(found))
        assert all(type(time) is int for part in found for time in part)
    for one in a:
        for other in b:
            assert common(one, other) == len(cells([one]) & cells([other]))
