"""Plans whose transfers meet at one place in an order of all ranks."""

from dataclasses import replace

import pytest

from overlap1f1b.plan import BlockShape, NodeCosts, Op, Overlap, Plan, compile, play_ranks, with_rendezvous
from overlap1f1b.schedule import SCHEDULES, Kind, Program, build_schedule
from tests.plan.rules import broken_rules, meets
from tests.tiers import first

COSTS = NodeCosts.uniform(attention=3, experts=4, dispatch=5, counts=0.4, aggregate=0.2, dense=1, reduce=2, send=1)
SHAPE = (BlockShape(expert_calls=1, reduced=True), BlockShape(expert_calls=0, reduced=True))
MOVED = (Op.RECEIVE, Op.REDUCE)


def programmed(name: str, ranks: int) -> Program:
    """With few microbatches: DualPipe needs two a rank."""
    return build_schedule(name, ranks=ranks, microbatches=2 * ranks if name.startswith("dualpipe") else ranks + 2)


def compiled(name: str, ranks: int, overlap: Overlap, costs: NodeCosts = COSTS) -> Plan:
    return compile(programmed(name, ranks), SHAPE, costs, overlap)


@pytest.mark.parametrize("ranks", first((2, 4), 2))
@pytest.mark.parametrize("costs", [COSTS, NodeCosts()], ids=["costs", "no costs"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_meets(name: str, costs: NodeCosts, ranks: int) -> None:
    """It is a plan as before: only receives and reductions have moved, and it takes no longer."""
    for overlap in ("serial", "pairs", 3):
        plan = compiled(name, ranks, overlap, costs)  # type: ignore[arg-type]
        met = with_rendezvous(plan, costs)
        assert not list(broken_rules(met))
        assert meets(met)
        for before, after in zip(plan.ranks, met.ranks, strict=True):
            assert [n for n in before if n.op not in MOVED] == [n for n in after if n.op not in MOVED]
            assert sorted(map(str, before)) == sorted(map(str, after))
        spans = play_ranks(met.ranks, plan.program.placement, costs)
        ends = {span.node: span.end for rank in spans for span in rank if span.node.op not in MOVED}
        spans = play_ranks(plan.ranks, plan.program.placement, costs)
        assert ends == {span.node: span.end for rank in spans for span in rank if span.node.op not in MOVED}


@pytest.mark.parametrize("ranks", first((2, 4), 2))
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_meets_with_launch_costs(name: str, ranks: int) -> None:
    costs = replace(COSTS, launch={(op, kind): 0.3 for op in Op for kind in Kind})
    plan = compile(programmed(name, ranks), SHAPE, costs, 3, counts_block=True)
    assert not list(broken_rules(plan))
    met = with_rendezvous(plan, costs, counts_block=True)
    assert not list(broken_rules(met))
    assert meets(met)


def test_a_receive_stands_where_its_message_is_sent() -> None:
    """The second rank is idle until the first sends: its receive comes first, not one action ahead."""
    met = with_rendezvous(compiled("1f1b", 2, "serial"), COSTS)
    texts = [str(node) for node in met.ranks[1]]
    assert texts[:3] == [f"{name}[0] m0 s1" for name in ("receive.f", "attention.f", "counts.f")]
    assert texts.index("receive.f[0] m1 s1") > texts.index("receive.f[0] m0 s1") + 2


def test_one_rank_stays_as_it_is() -> None:
    plan = compiled("combined_1f1b", 1, 3)
    assert with_rendezvous(plan, COSTS) is plan
    assert meets(plan)


def test_orders_in_which_ranks_would_wait_for_each_other() -> None:
    """1F1B's steady state: both neighbours send before they receive."""
    assert not meets(compiled("1f1b", 2, "serial"))


def test_reductions_of_replicas_stand_where_all_are() -> None:
    met = with_rendezvous(compiled("dualpipe", 2, 3), COSTS)
    reduced = [[(n.stage, n.block) for n in nodes if n.op is Op.REDUCE] for nodes in met.ranks]
    assert reduced[0] == reduced[1]
    late = list(met.ranks[0])
    late.append(late.pop(next(at for at, node in enumerate(late) if node.op is Op.REDUCE)))
    assert not meets(replace(met, ranks=(tuple(late), *met.ranks[1:])))
