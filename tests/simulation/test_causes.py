"""Causes of exposure: known faults of two simulated ranks are told apart, and causes add up."""

import random
from collections.abc import Mapping
from itertools import combinations
from typing import NamedTuple

import pytest

from overlap1f1b.plan import BlockShape, Node, NodeCosts, Op, Resource, Span, compile
from overlap1f1b.schedule import Kind, build_schedule
from overlap1f1b.simulation import CAUSES, Flown, Timeline
from overlap1f1b.simulation.causes import gaps
from tests.tiers import wide

COSTS = NodeCosts.uniform(attention=3, experts=4, dispatch=4, counts=0.2, aggregate=0.5, reduce=1)
TOKENS = 1000.0
EXCHANGES = (Resource.EXCHANGE, Resource.CONTROL)


class Faults(NamedTuple):
    """Of two ranks that share experts: the second's compute takes ``slow`` times as long, its host pauses."""

    slow: float = 1.0
    link: float = 1.0
    pause: float = 0.0
    first: float = 0.5
    """Share of all tokens that goes to the first rank's experts."""
    seed: int = 0


FAULTS: dict[str, tuple[str, Faults]] = {
    "slow rank": ("imbalance", Faults(slow=1.5)),
    "slow link": ("link", Faults(link=2.0)),
    "late host": ("host", Faults(pause=3.0)),
    "skewed router": ("imbalance", Faults(first=0.8)),
}


def played(faults: Faults, overlap: int = 2) -> tuple[Timeline, Timeline]:
    """The timelines of both ranks: one link, first in, first out, that carries rows once both ranks have posted."""
    program = build_schedule("combined_1f1b", microbatches=6, extra_warmup=1)
    plan = compile(program, (BlockShape(1, reduced=True),) * 2, COSTS, overlap)
    source = random.Random(faults.seed)
    now, free = [0.0, 0.0], [0.0, 0.0]
    ready: list[dict[object, float]] = [{}, {}]
    spans: list[list[Span]] = [[], []]
    carried: list[dict[Node, tuple[float, float]]] = [{}, {}]
    shares = faults.first, 1 - faults.first
    for node in plan.nodes:
        if source.random() < 0.1:
            now[1] += faults.pause
        if node.resource is Resource.COMPUTE:
            for rank in range(2):
                time = COSTS(node) * (faults.slow if rank else 1.0)
                time *= 2 * shares[rank] if node.op is Op.EXPERTS else 1.0
                begun = max(now[rank], ready[rank].get(node.chain, 0.0) if node.kind is not Kind.W else 0.0)
                now[rank] = begun + time
                spans[rank].append(Span(node, begun, now[rank]))
                if node.kind is not Kind.W:
                    ready[rank][node.chain] = now[rank]
            continue
        posted = [max(now[rank], ready[rank].get(node.chain, 0.0)) for rank in range(2)]
        outwards = (node.op is Op.DISPATCH) is (node.kind is Kind.F)  # to the experts, or back
        lane = EXCHANGES.index(node.resource)
        begun = max(*posted, free[lane])
        for rank in range(2):
            time, (mine, other) = COSTS(node), (shares[rank], shares[1 - rank])
            if node.op in (Op.DISPATCH, Op.COMBINE):
                time *= 2 * faults.link * (mine if outwards else other)
                sent, received = (other, 2 * mine) if outwards else (mine, 1.0)
                carried[rank][node] = TOKENS * sent, TOKENS * received
            spans[rank].append(Span(node, posted[rank], begun + time))
            if node.kind is not Kind.W:
                ready[rank][node.chain] = begun + time
        free[lane] = max(rank[-1].end for rank in spans)
    alone = [Timeline(tuple(spans[rank]), bytes=carried[rank], costs=COSTS) for rank in range(2)]
    one, other = (
        Timeline(mine.spans, bytes=mine.bytes, costs=COSTS, others=(its.causes.flown,))
        for mine, its in (alone, alone[::-1])
    )
    return one, other


def summed(faults: Faults, overlap: int) -> Mapping[str, float]:
    """What is exposed by cause over both ranks; on each, causes add up."""
    found = dict.fromkeys(CAUSES, 0.0)
    for timeline in played(faults, overlap):
        by_cause = timeline.by_cause
        assert sum(by_cause.values()) == pytest.approx(timeline.exposed, abs=1e-9)
        for cause, time in by_cause.items():
            found[cause] += time
    return found


@pytest.mark.parametrize("overlap", [2, *wide(1, 3)])
def test_known_faults_are_told_apart(overlap: int) -> None:
    usual, right, mixtures = summed(Faults(), overlap), 0, [*((one,) for one in FAULTS), *combinations(FAULTS, 2)]
    for seed in range(100):
        mixture, source = mixtures[seed % len(mixtures)], random.Random(seed)
        given = {name: FAULTS[fault][1] for fault in mixture for name in [fault]}
        none, strength = Faults(), source.uniform(0.8, 1.2)
        changed = {
            name: value + (strength - 1) * (value - default)
            for of in given.values()
            for name, value, default in zip(Faults._fields, of, none, strict=True)
            if value != default
        }
        found = summed(none._replace(**changed, seed=seed), overlap)
        growth = {cause: max(0.0, found[cause] - usual[cause]) for cause in CAUSES if cause != "order"}
        named = {cause for cause, time in growth.items() if time > 0.05 * sum(growth.values())}
        right += named == {FAULTS[fault][0] for fault in mixture}
    assert right >= 95, right


def step(*spans: tuple[str, int, float, float], **given: object) -> dict[str, float]:
    """Causes of a step of nodes of block 0; other microbatches' compute is beside it."""
    ops = {op.value: op for op in Op}
    kinds = {"f": Kind.F, "b": Kind.I, "w": Kind.W}
    nodes = [(Node(ops[op], kinds[kind], microbatch, 0), start, end)
             for text, microbatch, start, end in spans for op, kind in [text.split(".")]]  # fmt: skip
    costs = NodeCosts.uniform(attention=1, experts=1, dispatch=4, reduce=2)
    timeline = Timeline(tuple(Span(*one) for one in nodes), costs=costs, **given)  # type: ignore[arg-type]
    assert sum(timeline.by_cause.values()) == pytest.approx(timeline.exposed)
    return {cause: time for cause, time in timeline.by_cause.items() if time}


DISPATCH = Node(Op.DISPATCH, Kind.F, 0, 0)


def test_a_plan_leaves_an_exchange_open_that_takes_its_time() -> None:
    assert step(("attention.f", 0, 0, 2), ("dispatch.f", 0, 2, 6), ("experts.f", 0, 6, 8)) == {"order": 4}


def test_a_link_is_slow_by_what_an_exchange_takes_beyond_its_time_and_passes_it_on() -> None:
    slow = (("attention.f", 0, 0, 2), ("dispatch.f", 0, 2, 8), ("attention.f", 1, 2, 3), ("experts.f", 0, 8, 9))
    assert step(*slow) == {"order": 3, "link": 2}
    queued = (("dispatch.f", 1, 8, 14), ("experts.f", 1, 14, 15))
    assert step(*slow, *queued) == {"order": 4, "link": 6}  # the first one's 2, 4 of both's, and no compute from 9


@pytest.mark.parametrize(("late", "cause"), [(0.0, "imbalance"), *wide((9.0, "host"))])
def test_a_rank_waits_for_the_last_one_and_for_its_reason(late: float, cause: str) -> None:
    nodes = (("attention.f", 0, 0, 2), ("dispatch.f", 0, 2, 15), ("experts.f", 0, 15, 16))
    assert step(*nodes, others=[{DISPATCH: Flown(4.0, host=late)}]) == {"order": 4, cause: 9}


def test_rows_beyond_the_mean_are_imbalance() -> None:
    nodes = (("attention.f", 0, 0, 2), ("dispatch.f", 0, 2, 10), ("experts.f", 0, 10, 11))
    back = DISPATCH._replace(op=Op.COMBINE)
    given = {"bytes": {DISPATCH: (10.0, 0.0), back: (30.0, 0.0)}}
    others = [{DISPATCH: Flown(8.0, sent=30.0), back: Flown(8.0, sent=10.0)}]
    assert step(*nodes, ("combine.f", 0, 11, 11), others=others, **given) == {"order": 4, "imbalance": 2, "link": 2}


def test_a_host_is_late_where_nothing_is_awaited_any_more_or_not_posted_yet() -> None:
    busy = ("reduce.w", 1, 0, 2)
    nodes = (busy, ("attention.f", 0, 0, 2), ("combine.b", 1, 2, 12), ("dispatch.f", 0, 4, 8), ("experts.f", 0, 9, 12))
    assert step(*nodes) == {"host": 3, "order": 4}


def test_what_comes_next_waits_for_a_copy_to_host_memory() -> None:
    """Of any microbatch: the thread waits until activations have left. What ends later is what is awaited."""
    attention, dispatch, experts, offload = (
        Node(op, Kind.F, 0, 0) for op in (Op.ATTENTION, Op.DISPATCH, Op.EXPERTS, Op.OFFLOAD)
    )
    waits = Span(attention, 0.0, 1.0), Span(offload, 1.0, 5.0), Span(attention._replace(microbatch=1), 5.0, 6.0)
    assert [(one.start, one.end, one.cause) for one in Timeline(waits).causes.idle] == [(1.0, 5.0, "order")]
    passes = Span(attention, 0.0, 1.0), Span(offload, 1.0, 2.0), Span(dispatch, 1.0, 4.0), Span(experts, 4.0, 5.0)
    assert [gap.awaited and gap.awaited.node for gap in gaps(passes, {})] == [dispatch]


def test_the_pipeline_brought_no_microbatch() -> None:
    nodes = (("receive.f", 0, 0, 5), ("combine.b", 1, 3, 7), ("attention.f", 0, 5, 6))
    assert step(*nodes) == {"pipeline": 2, "order": 1}
