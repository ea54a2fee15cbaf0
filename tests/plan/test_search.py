"""Orders of actions that are found for the costs."""

from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import Mock, patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap1f1b.plan import BlockShape, NodeCosts, Op, Plan, compile, fastest, found_orders, pipeline_bound, play_ranks
from overlap1f1b.plan.search import LEAST_TRIES
from overlap1f1b.schedule import Kind, Placement, Program, build_schedule, variants
from tests.plan.cases import costs_of, shapes
from tests.plan.rules import broken_rules
from tests.plan.tries import few_tries
from tests.tiers import first

QUICK = 1e-3
"""Seconds of a search that makes the least number of tries."""


def synthesize(*given: Any, tries: int = 5, **options: Any) -> Plan:
    """Return the fastest plan of few tries, most often one that is found: fixed schedules open one action."""
    with patch.multiple("overlap1f1b.plan.search", LEAST_TRIES=tries, OVERLAP=1, LEAST_SECONDS=600), few_tries():
        return found_orders(*given, **{"seconds": QUICK} | options)[0]


def even(ratio: float = 1.0, **further: float) -> NodeCosts:
    """Experts : attention 4 : 3, exchange ``ratio`` times as long as compute."""
    return NodeCosts.uniform(attention=3, experts=4, dispatch=5.25 * ratio, **further)


def layers(placement: Placement, parts: int, a_rank: int = 4) -> tuple[BlockShape, ...]:
    return (BlockShape(expert_calls=1, parts=parts),) * (a_rank * placement.ranks // placement.stages)


def over_bound(plan: Plan, a_rank: int = 4) -> float:
    """The makespan over the larger of compute and exchange, which are equal here."""
    return plan.predicted / (21 * a_rank * plan.program.microbatches)


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    return draw(st.sampled_from([Placement.loop, Placement.v]))(draw(st.integers(1, 3)), draw(st.integers(1, 2)))


@given(st.data())
@settings(deadline=None, max_examples=8)
def test_what_is_found_keeps_every_rule(data: st.DataObject) -> None:
    """Rules of programs and plans, the limit of activations, and the bound."""
    placement, microbatches = data.draw(placements()), data.draw(st.integers(1, 3))
    shape = data.draw(shapes())[:2]
    costs, parts = data.draw(costs_of(shape)), data.draw(st.integers(1, 3))
    shape = tuple(block._replace(parts=1 if block.exchanges else parts) for block in shape)
    limit, waits = data.draw(st.sampled_from([1.0, 1.5, 2.25, 4.0])), data.draw(st.booleans())
    plan = synthesize(placement, microbatches, shape, costs, peak_activations=limit, counts_block=waits)
    plan.program.check()
    assert not list(broken_rules(plan))
    ranks = range(placement.ranks)
    assert max(plan.live(rank) for rank in ranks) * placement.share <= limit
    assert max(plan.program.peak_activations) * placement.share <= limit or plan.order != "found"
    spans = play_ranks(plan.ranks, placement, costs, counts_block=waits)
    assert plan.predicted == max(span.end for rank in spans for span in rank)
    assert pipeline_bound(placement, microbatches, shape, costs) <= plan.predicted * (1 + 1e-9)


def test_exchanges_of_a_block_s_own_beside_parts() -> None:
    """Two dispatches and one combine: of these a segment needs the last, not the one of its own number."""
    own = BlockShape(expert_calls=0, exchanges=(Op.DISPATCH, Op.DISPATCH, Op.COMBINE))
    costs = NodeCosts.uniform(attention=0, experts=0, dispatch=0, combine=5, counts=5)
    plan = synthesize(Placement.loop(1, 2), 2, (own, BlockShape(1, parts=3)), costs, peak_activations=4)
    assert not list(broken_rules(plan))


@pytest.mark.parametrize(
    ("placement", "microbatches", "peak", "most"),
    [
        (Placement.v(2, 4), 8, 4, 1.12),
        pytest.param(Placement.v(4, 4), 16, 7.5, 1.14, marks=pytest.mark.wide),
        pytest.param(Placement.loop(4, 4), 16, 6, 1.25, marks=pytest.mark.wide),
    ],
    ids=["2 ranks", "4 ranks", "4 ranks, less memory"],
)
def test_figures_of_two_parts(placement: Placement, microbatches: int, peak: float, most: float) -> None:
    """Found with the least number of tries of a user's search, so the same on every machine."""
    costs = even().in_parts(2)
    plan = synthesize(placement, microbatches, layers(placement, 2), costs, peak_activations=peak, tries=LEAST_TRIES)
    assert not list(broken_rules(plan))
    assert over_bound(plan) <= most
    assert max(map(plan.live, range(placement.ranks))) * placement.share <= peak


def fixed(placement: Placement, microbatches: int) -> list[Program]:
    """Every fixed schedule of a placement."""
    programs = []
    for name, options in variants(chunks=[placement.stages // placement.ranks]):
        with suppress(ValueError):
            programs.append(build_schedule(name, ranks=placement.ranks, microbatches=microbatches, **options))
    return [program for program in programs if program.placement == placement]


@pytest.mark.parametrize("seed", first(range(12), 0, 1))
def test_random_costs(seed: int) -> None:
    """Plans come in the order of their times, and no fixed schedule within the limit is faster."""
    draw = Random(seed)
    placement = draw.choice((Placement.loop, Placement.v))(draw.randint(1, 2), draw.randint(1, 2))
    microbatches, waits, limit = draw.randint(1, 4), draw.random() < 0.5, draw.choice((1.0, 2.0, 4.0))
    times = {name: draw.uniform(0.5, 4) for name in ("attention", "experts", "dispatch", "combine", "counts", "send")}
    costs = NodeCosts.uniform(**times, shared_links=draw.random() < 0.5, launch=draw.choice((0.0, 0.3))).in_parts(2)
    if draw.random() < 0.5:  # the last stage is slower
        slow = {(Op.ATTENTION, kind, placement.stages - 1, 0, 0, 0): 6.0 for kind in (Kind.F, Kind.I, Kind.W)}
        costs = replace(costs, by_node=slow)
    shape = (BlockShape(expert_calls=1, parts=2, reduced=draw.random() < 0.5),)
    options: dict[str, Any] = {"counts_block": waits}
    plans = found_orders(placement, microbatches, shape, costs, peak_activations=limit, seconds=QUICK, **options)
    ends = [plan.predicted for plan in plans]
    assert ends == sorted(ends)
    for program in fixed(placement, microbatches):
        plan = compile(program, shape, costs, 3, **options)
        if max(map(plan.live, range(placement.ranks))) * placement.share <= limit:
            assert ends[0] <= plan.predicted * (1 + 1e-9), program.name


def test_every_rank_finds_the_same() -> None:
    placement = Placement.v(2, 4)
    found = [synthesize(placement, 3, layers(placement, 2), even().in_parts(2)) for _ in range(2)]
    assert found[0] == found[1]


def test_a_larger_search_is_not_worse_here() -> None:
    placement, costs = Placement.v(2, 4), even().in_parts(2)
    small, large = (
        synthesize(placement, 5, layers(placement, 2), costs, peak_activations=4, seconds=seconds).predicted
        for seconds in (QUICK, 0.3)
    )
    assert large < small


@pytest.mark.parametrize("send", first((5, 12), 5))
def test_transfers_that_share_links_are_planned_for(send: float) -> None:
    """The order for shared links is not slower there than the order for links of their own."""
    placement = Placement.v(2)
    shape, shared = layers(placement, 2, 2), even(send=send, shared_links=True).in_parts(2)
    plans = [
        synthesize(placement, 6, shape, costs, peak_activations=3, tries=LEAST_TRIES)
        for costs in (shared, even(send=send).in_parts(2))
    ]
    ends = [max(span.end for rank in play_ranks(p.ranks, placement, shared) for span in rank) for p in plans]
    assert ends[0] <= ends[1]
    assert plans[0].predicted == ends[0]


def test_a_program_that_is_found_is_written_and_read(tmp_path: Path) -> None:
    placement = Placement.v(2, 4)
    plan = synthesize(placement, 4, layers(placement, 1), even(), peak_activations=2)
    plan.program.to_csv(tmp_path / "auto.csv")
    assert Program.from_csv(tmp_path / "auto.csv") == plan.program
    assert plan.program.draw().startswith("rank 0: 0F0 ")
    assert not list(broken_rules(compile(plan.program, plan.shapes, even(), 3)))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"costs": None}, "costs=None; allowed: NodeCosts"),
        ({"microbatches": 0}, "microbatches=0; allowed: 1 or more"),
        ({"peak_activations": 0.5}, "peak_activations=0.5; allowed: 1 or more, since a rank holds all of one"),
    ],
)
def test_bad_values(changed: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"placement": Placement.v(2), "microbatches": 2, "shape": (BlockShape(1),)}
    with pytest.raises(ValueError, match=f"^{message}$"):
        found_orders(**given | {"costs": even(), **changed})


@pytest.mark.parametrize(("looks", "compiles"), [(0.5, False), (0.01, True)])
def test_a_search_ends_in_its_time(looks: float, compiles: bool) -> None:
    """Here each look at the clock takes some time: what was found by then is the result."""
    placement, clock, compiled = Placement.loop(2), count(0.0, looks), Mock(side_effect=fastest)
    search = {"time": Mock(thread_time=lambda: next(clock)), "fastest": compiled}
    with patch.multiple("overlap1f1b.plan.search", **search), few_tries():
        plans = found_orders(placement, 4, layers(placement, 1), even(0.9), peak_activations=3, seconds=5.0)
    assert plans[0].predicted == min(plan.predicted for plan in plans) < float("inf")
    assert compiled.called == compiles
