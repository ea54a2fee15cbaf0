"""Every range's name is read back to the range."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap1f1b.plan import Node, Op
from overlap1f1b.plan.ranges import ActionRange, Label, NodeRange, Range, StepRange, parse_node, parse_range
from overlap1f1b.schedule import Action, Kind

NUMBERS = st.integers(0, 10**6)
KINDS = st.sampled_from((Kind.F, Kind.I, Kind.W))
NODES = st.builds(Node, st.sampled_from(Op), KINDS, *[NUMBERS] * 5, st.integers(0, 1))
LABELS = st.builds(
    Label, NUMBERS, st.dictionaries(st.sampled_from(("pp", "dp", "ep")), st.tuples(NUMBERS, NUMBERS), max_size=3)
)
RANGES = st.one_of(
    LABELS,
    st.builds(StepRange, NUMBERS),
    st.builds(NodeRange, st.sampled_from(("node", "flight", "wait")), NODES),
    st.builds(ActionRange, st.builds(Action, st.sampled_from(Kind), NUMBERS, NUMBERS, st.integers(0, 1))),
)


@given(RANGES)
def test_a_name_is_read_back(given: Range) -> None:
    assert parse_range(str(given)) == given
    if isinstance(given, NodeRange):
        assert parse_node(str(given.node)) == given.node


def test_names_as_the_tools_show_them() -> None:
    wanted = {
        "o1 rank 3: pp 1/2, dp 0/1, ep 1/2": Label(3, {"pp": (1, 2), "dp": (0, 1), "ep": (1, 2)}),
        "o1 step 17": StepRange(17),
        "o1 experts.w[1] m3 s2'": NodeRange("node", Node(Op.EXPERTS, Kind.W, 3, 1, 0, 0, 2, 1)),
        "o1 flight dispatch.b[0.1] m12": NodeRange("flight", Node(Op.DISPATCH, Kind.I, 12, 0, 1)),
        "o1 flight dispatch.b[0.1.2] m12": NodeRange("flight", Node(Op.DISPATCH, Kind.I, 12, 0, 1, 2)),
        "o1 wait receive.f[0] m0 s1": NodeRange("wait", Node(Op.RECEIVE, Kind.F, 0, 0, 0, 0, 1)),
        "o1 action (0)": None,
        "o1 action 2'B0": ActionRange(Action(Kind.B, 2, 0, 1)),
    }
    assert {name: parse_range(name) for name in wanted} == wanted
    assert all(str(found) == name for name, found in wanted.items() if found)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "o1",
        "aten::mm",
        "experts.f[0] m0",
        "o1 step",
        "o1 step ١",
        "o1 experts.f[0]",
        "o1 experts.f[0] m0 s",
        "o1 experts.x[0] m0",
        "o1 cooking.f[0] m0",
        "o1 flight flight dispatch.f[0] m0",
        "o1 action 2X0",
        "o1 rank x:",
        "o1 rank 0: pp 0/1,",
        "o1 rank 0: pp 0/1, dp",
        "o1 experts.f[0] m0\n",
    ],
)
def test_other_names_are_none_of_ours(name: str) -> None:
    assert parse_range(name) is None
