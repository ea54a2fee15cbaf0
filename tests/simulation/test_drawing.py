"""Rows without overlaps, and short names."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from overlap1f1b.plan import RECOMPUTES, Node, Op
from overlap1f1b.schedule import Kind
from overlap1f1b.simulation.drawing import LETTERS, stacked, text_of
from overlap1f1b.simulation.trace import Event

times = st.tuples(st.integers(0, 12), st.integers(0, 6)).map(lambda t: (t[0], t[0] + t[1]))


@given(st.lists(times, max_size=12))
def test_rows_hold_every_span_once_and_none_over_another(parts: list[tuple[int, int]]) -> None:
    spans = [Event("rank 0", "compute", str(index), *part) for index, part in enumerate(parts)]
    rows = stacked(spans)
    assert sorted(event for row in rows for event in row) == sorted(spans)
    for row in rows:
        assert row
        assert all(before.end <= after.start for before, after in pairwise(row))
    long = [part for part in parts if part[1] > part[0]]
    at_once = max((sum(start <= cell < end for start, end in long) for cell in range(20)), default=0)
    if len(long) == len(parts):
        assert len(rows) == at_once  # no more rows than needed


def test_sub_ops_have_letters_of_their_own() -> None:
    assert set(LETTERS) == set(Op)
    firsts = [letter for op, letter in LETTERS.items() if op not in RECOMPUTES]
    assert len(set(firsts)) == len(firsts)
    node = Node(Op.EXPERTS, Kind.W, microbatch=2, block=1, stage=3, pipe=1)
    assert text_of(node, staged=False) == "ew2"
    assert text_of(node, staged=True) == "3'ew2"
    assert text_of(node._replace(kind=Kind.F, pipe=0), staged=True) == "3E2"
    assert text_of(node._replace(op=Op.RECOMPUTE_EXPERTS, kind=Kind.I), staged=False) == "er2"
