"""Orders by priorities: within every limit, of any keys, and what each setting does."""

from random import Random

import pytest

from overlap1f1b.plan import BlockShape, Chains, Node, NodeCosts, play_ranks
from overlap1f1b.plan.priorities import Priorities, Tasks, schedule_by_priorities
from overlap1f1b.plan.search import plan_of
from overlap1f1b.schedule import Kind, Placement
from tests.plan.cases import MOE
from tests.plan.rules import broken_rules

Keys = dict[tuple[int, int, int, Kind], float]
ONE = Placement.loop(1)


def costs(dispatch: float) -> NodeCosts:
    return NodeCosts.uniform(attention=3, experts=4, dispatch=dispatch)


def by_microbatch(stages: int, microbatches: int) -> Keys:
    """Keys by which a microbatch comes before the next one."""
    kinds = (Kind.F, Kind.I)
    return {(0, s, m, kind): float(m) for s in range(stages) for m in range(microbatches) for kind in kinds}


def begun(nodes: list[Node]) -> str:
    """Forwards and backwards in the order in which they begin, as ``F0 I0``."""
    return " ".join(dict.fromkeys(f"{node.kind}{node.microbatch}" for node in nodes if node.kind is not Kind.W))


def test_random_priorities_keep_every_rule() -> None:
    """With more microbatches than fit, exchanges that wait for their launch, and caps, in any order of keys."""
    placement, microbatches = Placement.v(2, 2), 8
    parted = costs(10.5).in_parts(2)
    chains, draw = Chains(placement, (BlockShape(expert_calls=1, parts=2),) * 2), Random(1)
    tasks = Tasks(chains, parted)
    for _ in range(8):
        keys = {
            key: draw.gauss(0, 3) + key[2] * draw.choice((-1, 0, 1))
            for key in by_microbatch(placement.stages, microbatches)
        }
        caps = [draw.randint(1, 8) for _ in range(4)]
        limits = [draw.randint(2, 12) for _ in range(2)]
        priorities = Priorities(keys, limits, caps, draw.randint(0, 2), draw.choice((0.0, 1.0)), draw.random())
        ranks, end = schedule_by_priorities(microbatches, tasks, priorities)
        plan = plan_of(ranks, chains, microbatches)
        assert not list(broken_rules(plan))
        plan.program.check()
        assert all(plan.live(rank) <= limits[rank] for rank in range(2))
        spans = play_ranks(ranks, placement, parted)
        assert end == max(span.end for rank in spans for span in rank)


@pytest.mark.parametrize(
    ("limit", "cap", "deferred", "order"),
    [
        (4, 4, 0, "F0 F1 F2 F3 I0 I1 I2 I3"),
        (2, 4, 9, "F0 F1 I0 F2 I1 F3 I2 I3"),
        (2, 4, 0, "F0 F1 I0 I1 F2 I2 F3 I3"),  # weight gradients still hold the room
        (4, 2, 0, "F0 F1 I0 F2 I1 F3 I2 I3"),
        (1, 4, 0, "F0 I0 F1 I1 F2 I2 F3 I3"),
    ],
)
def test_smaller_keys_come_first_within_limits(limit: int, cap: int, deferred: int, order: str) -> None:
    """All forwards are wanted first, of one dense block."""
    keys = {key: key[2] + (100 if key[3] is Kind.I else 0) for key in by_microbatch(1, 4)}
    tasks = Tasks(Chains(ONE, (BlockShape(expert_calls=0),)), NodeCosts.uniform(attention=1, experts=1, dispatch=1))
    ranks, _ = schedule_by_priorities(4, tasks, Priorities(keys, [limit], [cap], deferred))
    assert begun(ranks[0]) == order


def scheduled(microbatches: int, dispatch: float, *, lookahead: float = 0.0, patience: float = 0.0) -> list[str]:
    """Nodes of one block with experts, of which earlier microbatches are wanted first."""
    keys, most = by_microbatch(1, microbatches), [microbatches]
    tasks = Tasks(Chains(ONE, (MOE,)), costs(dispatch))
    ((nodes,), _) = schedule_by_priorities(microbatches, tasks, Priorities(keys, most, most, 9, lookahead, patience))
    return [str(node) for node in nodes]


def test_a_smaller_key_is_waited_for_within_the_lookahead() -> None:
    """The first rows are there at 7; the second attention ends at 6, and the third would take 3."""
    for lookahead, first in ((0.3, "attention.f[0] m2"), (0.4, "experts.f[0] m0")):
        nodes = scheduled(3, 4.0, lookahead=lookahead)
        assert min(("attention.f[0] m2", "experts.f[0] m0"), key=nodes.index) == first


def test_weight_gradients_are_issued_in_waits_that_are_long_enough() -> None:
    """The second microbatch's rows come 2 behind the first one's experts, whose weight gradient takes 4."""
    for patience, first in ((0.5, "experts.w[0] m0"), (0.6, "experts.b[0] m1")):
        nodes = scheduled(2, 6.0, patience=patience)
        assert min(("experts.w[0] m0", "experts.b[0] m1"), key=nodes.index) == first


def test_a_step_beyond_the_limit_is_given_up() -> None:
    tasks, priorities = Tasks(Chains(ONE, (MOE,)), costs(5)), Priorities(by_microbatch(1, 4), [1], [1])
    ranks, end = schedule_by_priorities(4, tasks, priorities)
    assert schedule_by_priorities(4, tasks, priorities, end) == (ranks, end)
    fewer, late = schedule_by_priorities(4, tasks, priorities, 0.8 * end)
    assert late == float("inf")
    assert len(fewer[0]) < len(ranks[0])
