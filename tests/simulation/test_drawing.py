"""Rows without overlaps, and lanes as text."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap1f1b.plan import RECOMPUTES, Node, NodeCosts, Op, Span
from overlap1f1b.schedule import Kind, build_schedule
from overlap1f1b.simulation import Timeline, simulate
from overlap1f1b.simulation.drawing import LETTERS, stacked, text_of
from overlap1f1b.simulation.trace import Event

ROOT = Path(__file__).parents[2]


def span(op: Op, start: float, end: float, stage: int = 0, microbatch: int = 0, pipe: int = 0) -> Span:
    return Span(Node(op, Kind.F, microbatch, 0, 0, stage, pipe), start, end)


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


def test_every_lane_that_is_used_has_a_line() -> None:
    spans = [span(Op.ATTENTION, 0, 4), span(Op.COUNTS, 4, 6), span(Op.DISPATCH, 6, 10), span(Op.EXPERTS, 10, 14)]
    assert Timeline(tuple(spans)).draw(14).splitlines() == [
        "compute  A0--      E0--",
        "exchange       D0--",
        "control      N0",
    ]
    spans += [span(Op.SEND, 14, 18), span(Op.SEND, 15, 20, microbatch=1), span(Op.SEND, 18, 20, microbatch=2)]
    assert Timeline(tuple(spans)).draw(20).splitlines()[3:] == [
        "peer                   S0--S2",
        "                        S1---",
    ]
    assert Timeline((span(Op.DENSE, 0, 2),)).draw(4).splitlines() == ["compute  M0--", "exchange"]
    assert Timeline(()).draw(4).splitlines() == ["compute", "exchange"]


def test_stages_and_pipes_are_told_apart() -> None:
    chunks = Timeline((span(Op.ATTENTION, 0, 4, stage=0), span(Op.ATTENTION, 4, 8, stage=2)))
    assert chunks.draw(8).splitlines()[0] == "compute  0A0-2A0-"
    pipes = Timeline((span(Op.ATTENTION, 0, 4), span(Op.ATTENTION, 4, 8, microbatch=3, pipe=1)))
    assert pipes.draw(8).splitlines()[0] == "compute  0A0-0'A3"


def test_lanes_of_several_ranks_and_chunks() -> None:
    costs = NodeCosts.uniform(attention=4, experts=4, dispatch=4, counts=4, send=4)
    program = build_schedule("interleaved_1f1b", ranks=2, microbatches=1, chunks=2, forward_only=True)
    assert simulate(program, costs, overlap="serial").draw(92).splitlines() == [
        "rank 0",
        "compute  0A0-        0E0-                                2A0-        2E0-",
        "exchange         0D0-    0C0-                                    2D0-    2C0-",
        "control      0N0-                                            2N0-",
        "peer                         0S0-                                            2S0-",
        "rank 1",
        "compute                          1A0-        1E0-                                3A0-        3E0-",
        "exchange                                 1D0-    1C0-                                    3D0-    3C0-",
        "control                              1N0-                                            3N0-",
        "peer                                                 1S0-",
    ]


@pytest.mark.parametrize(("width", "message"), [(0, "width=0; allowed: 1 or more"), (1.5, "width=1.5; allowed: a wh")])
def test_width(width: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Timeline(()).draw(width)
