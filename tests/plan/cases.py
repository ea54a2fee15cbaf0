"""Programs, stages and costs for tests of plans: drawn by hypothesis, and those of the design's table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product

from hypothesis import strategies as st

from overlap1f1b.plan import (
    RESOURCE_OF,
    BlockShape,
    Chains,
    Held,
    Node,
    NodeCosts,
    Op,
    Plan,
    Resource,
    Span,
    StageShape,
    play_ranks,
)
from overlap1f1b.plan.costs import Cost, CostKey
from overlap1f1b.plan.intervals import Intervals
from overlap1f1b.schedule import Action, Kind, Program
from overlap1f1b.schedule.placement import SINGLE
from tests.programs import combined_1f1b, forward_only, sequential

MOE = BlockShape(expert_calls=1)
DENSE = BlockShape(expert_calls=0)


def chains_of(shape: StageShape) -> Chains:
    """On one rank."""
    return Chains(SINGLE, shape)


def with_nodes(plan: Plan, nodes: Iterable[Node]) -> Plan:
    """A plan of one rank with other nodes."""
    return replace(plan, ranks=(tuple(nodes),))


def all_forwards_first(backwards: Sequence[int]) -> Program:
    """``F0 F1 F2 B2 B0 B1``, the backwards in any order."""
    microbatches = len(backwards)
    forwards = [Action(Kind.F, 0, m) for m in range(microbatches)]
    steps = (*forwards, *(Action(Kind.B, 0, m) for m in backwards))
    return Program("all_forwards_first", microbatches, (steps,), (microbatches,))


@st.composite
def programs(draw: st.DrawFn) -> Program:
    microbatches = draw(st.integers(1, 4))
    choices = [sequential(microbatches), forward_only(microbatches)]
    choices += [combined_1f1b(microbatches, extra) for extra in range(3)]
    choices += [all_forwards_first(draw(st.permutations(range(microbatches))))]
    return draw(st.sampled_from(choices))


def shapes() -> st.SearchStrategy[StageShape]:
    """Dense, with one call of experts, with several, or with exchanges; weights apart, reduced, recomputed, or not."""
    options = {
        "split": st.booleans(),
        "reduced": st.booleans(),
        "recompute": st.sampled_from(["none", "none", "experts", "attention", "block"]),
        "offload": st.booleans(),
    }
    exchanges = st.lists(st.sampled_from([Op.DISPATCH, Op.COMBINE]), min_size=1, max_size=4).map(tuple)
    calls, parts = st.sampled_from([1, 1, 1, 2, 3]), st.sampled_from([1, 1, 2, 3])
    none, whole, nothing = st.just(0), st.just(1), st.just(())
    blocks = st.one_of(
        st.builds(BlockShape, expert_calls=calls, exchanges=nothing, parts=parts, **options),
        st.builds(BlockShape, expert_calls=none, exchanges=exchanges, parts=whole, **options),
        st.builds(BlockShape, expert_calls=none, exchanges=nothing, parts=whole, **options),
    )
    return st.lists(blocks, min_size=1, max_size=3).map(tuple)


@st.composite
def costs_of(draw: st.DrawFn, shape: StageShape) -> NodeCosts:
    """Quarters of a unit, so that sums are exact; in some cases for each node, in some over several links."""
    links = draw(st.integers(1, 3))
    quarters = st.integers(0, 40).map(lambda n: n / 4)
    by_op: dict[tuple[Op, Kind], float] = {(op, kind): draw(quarters) for op in Op for kind in Kind}
    by_node: dict[CostKey, Cost] = {}
    for key in draw(st.lists(st.sampled_from(sorted(by_op)), max_size=4, unique=True)):
        block = draw(st.integers(0, len(shape) - 1))
        call = draw(st.integers(0, max(0, shape[block].expert_calls - 1))), draw(st.integers(0, shape[block].parts - 1))
        several = RESOURCE_OF[key[0]] is not Resource.COMPUTE
        place = (0, 0, 0, 0) if key[0] is Op.SEND else (0, block, *call)
        by_node[(*key, *place)] = draw(st.tuples(*[quarters] * links)) if several else draw(quarters)
    return NodeCosts(by_op, by_node)


def play(nodes: Sequence[Node], costs: NodeCosts, *, counts_block: bool = False) -> list[Span]:
    """The spans of the nodes of a single rank."""
    (spans,) = play_ranks([nodes], SINGLE, costs, counts_block=counts_block)
    return spans


def makespan(nodes: Sequence[Node], costs: NodeCosts, *, counts_block: bool = False) -> float:
    """The time at which the last node of a single rank ends."""
    return max((span.end for span in play(nodes, costs, counts_block=counts_block)), default=0.0)


def table_costs(ratio: float) -> NodeCosts:
    """Experts : attention 4 : 3, B = 2F, W half of B; a layer's four exchanges take ``ratio`` times its compute."""
    return NodeCosts.uniform(attention=3, experts=4, dispatch=ratio * 21 / 4)


def table_bytes(stages: int, layers: int) -> dict[CostKey, Held]:
    """What layers with experts hold, of any unit: the backward frees four parts of ten, the weight gradient six."""
    held = dict[CostKey, Held]()
    for stage, block, (op, kept) in product(range(stages), range(layers), ((Op.ATTENTION, 10), (Op.EXPERTS, 20))):
        held[op, Kind.F, stage, block, 0, 0] = Held(kept)
        held[op, Kind.I, stage, block, 0, 0] = Held(-0.4 * kept, kept // 5)
        held[op, Kind.W, stage, block, 0, 0] = Held(-0.6 * kept)
    return held


def table_bound(microbatches: int, layers: int, ratio: float) -> float:
    """The larger of compute only and exchange only, by :func:`table_costs`."""
    return microbatches * layers * 21 * max(1.0, ratio)


def cells(parts: Intervals) -> set[int]:
    """The unit cells that intervals with whole ends cover; of one that ends before it starts none."""
    return {cell for start, end in parts for cell in range(int(start), int(end))}
