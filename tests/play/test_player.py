"""Nodes are played in order, observed, and counted."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b.engine import Engine
from overlap1f1b.plan import Node, NodeCosts, Op, Overlap, Place, Resource, compile
from overlap1f1b.play.observers import Observer
from overlap1f1b.play.times import Times
from overlap1f1b.schedule import Kind, build_schedule
from overlap1f1b.transport.exchange import build_exchange
from tests import models
from tests.engine.test_engine import Delayed
from tests.engines import COSTS, make
from tests.observing import Around, Last
from tests.plan.tries import all_tries
from tests.ranks import over
from tests.tiers import wide


def engine(model: Any, name: str = "combined_1f1b", microbatches: int = 4) -> Engine:
    return make(model, build_schedule(name, microbatches=microbatches), costs=COSTS, verify=False)


class Noting(Observer):
    """Notes what it is told."""

    keeps_order = True

    def __init__(self) -> None:
        self.told: list[tuple[str, Node | None]] = []

    def begin(self, times: Times) -> None:
        self.told.append(("begin", None))

    def before(self, node: Node) -> None:
        self.told.append(("before", node))

    def ready(self, node: Node, received: Mapping[Place, Any]) -> None:
        self.told.append(("ready", node))

    def after(self, node: Node) -> None:
        self.told.append(("after", node))

    def end(self, *, failed: bool) -> None:
        self.told.append((f"end {failed}", None))


def test_an_observer_is_told_of_every_node_in_the_plans_order() -> None:
    played, (inputs, target), noting = engine(models.build()), models.batch(4), Noting()
    played.observers.append(noting)
    spans = played.step(inputs, target=target).overlap.spans
    nodes = played.plan.ranks[0]
    each = [(when, node) for node in nodes for when in ("before", "ready", "after")]
    assert noting.told == [("begin", None), *each, ("end False", None)]
    assert {span.node for span in spans} == set(nodes)
    computed = [span for span in spans if span.node.resource is Resource.COMPUTE]
    assert all(a.end <= b.start for a, b in pairwise(computed))
    played.observers.remove(noting)
    told = len(noting.told)
    played.step(inputs, target=target)
    assert len(noting.told) == told


def _left_by_both_ways(
    schedule: str, overlap: Overlap, mesh: Any = None, *, tied: bool = False, dropout: float = 0.0, **options: Any
) -> bool:
    """Three steps and an evaluation leave the same in calls of several blocks, if any (returned), as node by node."""
    group = None if mesh is None or "ep" not in mesh.mesh_dim_names else mesh.get_group("ep")
    ranks = 1 if mesh is None or "pp" not in mesh.mesh_dim_names else mesh["pp"].size()
    program = build_schedule(schedule, ranks=ranks, microbatches=4, **options)
    left: list[list[Tensor]] = []
    several = []
    for by_node in (False, True):
        model = models.build(group, tied=tied, dropout=dropout)
        blocks = [*model[:1], *(nn.Linear(models.H, models.H) for _ in range(2)), nn.Dropout(dropout), *model[1:]]
        played = make(blocks, program, mesh=mesh, costs=COSTS, overlap=overlap, verify=False)
        inputs, target = models.batch(4)
        if by_node:
            played.observers.append(Last())
        found: list[Tensor] = []
        for step in range(3):
            torch.manual_seed(step)
            found += played.step(inputs, target=target).losses
        several.append("in calls of several" in played.tuner.choice)
        found += played.evaluate(inputs, target=target).losses
        own = (p for stage in played.stages.values() for block in stage.blocks for p in block.parameters())
        left.append([*found, *(p.grad for p in dict.fromkeys(own) if p.grad is not None)])
    assert len(left[0]) == len(left[1])
    assert all(map(torch.equal, *left))
    assert not several[1]
    return several[0]


@pytest.mark.parametrize(
    ("schedule", "overlap", "tied", "dropout"),
    [
        ("sequential", "serial", True, 0.1),
        ("afab", "serial", False, 0.0),
        *wide(("combined_1f1b", 3, False, 0.1), ("combined_1f1b", "serial", True, 0.0)),
    ],
)
def test_calls_of_several_blocks_leave_what_their_nodes_leave(
    schedule: str, overlap: Overlap, tied: bool, dropout: float
) -> None:
    assert _left_by_both_ways(schedule, overlap, tied=tied, dropout=dropout)


@pytest.mark.parametrize(("schedule", "chunks"), [("zb_h1", 1), *wide(("interleaved_1f1b", 2), ("zb_v", 1))])
@over(2)
def test_calls_of_several_blocks_over_a_pipeline(rank: int, size: int, schedule: str, chunks: int) -> None:
    """Weight gradients that fill a bubble are computed apart."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("pp",))
    _left_by_both_ways(schedule, 2, mesh, dropout=0.1, **({"chunks": chunks} if chunks > 1 else {}))


@over(2)
def test_calls_of_several_blocks_between_blocks_that_exchange(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    assert _left_by_both_ways("combined_1f1b", 3, mesh, dropout=0.1)


@over(2)
def test_the_time_of_counts_has_no_meeting_of_the_ranks(rank: int, size: int) -> None:
    """Counts had arrived before the ranks met next, while nodes are measured."""
    program = build_schedule("sequential", microbatches=2)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    played = make(models.build(mesh.get_group("ep")), program, mesh=mesh, parts=3)
    meetings: list[float] = []

    def barrier() -> None:
        meetings.append(time.perf_counter())
        dist.barrier()

    with patch.object(played.mesh, "barrier", barrier):
        result = played.step(*models.batch(2, seed=rank))
    ends = {span.node: result.times.begun + span.end for span in result.overlap.spans}
    exchanges = [node for node in played.plan.ranks[0] if node.op in (Op.COUNTS, Op.DISPATCH, Op.COMBINE)]
    assert len(exchanges) == len(meetings)
    following = zip(exchanges, meetings[1:], strict=False)
    found = [(ends[node], begun) for node, begun in following if node.op is Op.COUNTS]
    assert len(found) == 2 * 2 * 3, found
    assert all(arrived < met for arrived, met in found), found


def test_a_backward_runs_outside_the_autocast_of_its_step() -> None:
    played, (inputs, target) = engine(models.build()), models.batch(4)
    enabled: dict[Kind, set[bool]] = {}

    @contextmanager
    def around(node: Node) -> Iterator[None]:
        enabled.setdefault(node.kind, set()).add(torch.is_autocast_enabled("cpu"))
        yield

    played.observers.append(Around(around))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        played.step(inputs, target=target)
    assert enabled == {Kind.F: {True}, Kind.I: {False}, Kind.W: {False}}


class Wraps(models.Block):
    """Makes an error of its own from whatever ends its experts; raises behind them in the first forward."""

    ended = calls = 0

    def around(self, experts: nn.Module, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        try:
            rows: Tensor = experts(tokens, indices, weights)
        except BaseException as error:
            Wraps.ended += 1
            raise RuntimeError("experts failed") from error
        Wraps.calls += 1
        if Wraps.calls == 1:
            raise KeyError("the cause")
        return rows


def test_blocks_that_fail_while_they_are_ended_do_not_hide_the_cause() -> None:
    played, (inputs, target) = engine(models.build(block=Wraps), "afab"), models.batch(4)
    played.plan = compile(played.program, played.shapes, NodeCosts.uniform(attention=3, experts=4, dispatch=60), 8)
    Wraps.ended = Wraps.calls = 0
    with pytest.raises(KeyError, match="the cause"):
        played.step(inputs, target=target)
    assert Wraps.ended


def test_the_position_of_a_node_that_fails_is_known() -> None:
    played, (inputs, target) = engine(models.build()), models.batch(4)

    @contextmanager
    def around(node: Node) -> Iterator[None]:
        if node.kind is Kind.W:
            raise KeyError("mine")
        yield

    played.observers.append(Around(around))
    with pytest.raises(KeyError, match="mine") as raised:
        played.step(inputs, target=target)
    position = next(at for at, node in enumerate(played.plan.ranks[0]) if node.kind is Kind.W)
    assert any(f"position {position} of its plan" in note for note in raised.value.__notes__)


class Slow(Delayed):
    """Every exchange is late."""

    def _pause(self) -> None:
        time.sleep(0.004)


@pytest.mark.parametrize("name", ["sequential", *wide("combined_1f1b", "zb_h1", "auto")])
@over(2)
def test_late_exchanges_are_waited_for_with_weight_gradients(rank: int, size: int, name: Any) -> None:
    mesh, data = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)), models.batch(4, seed=rank)
    group, reference, problems = mesh.get_group("ep"), None, []
    costs = NodeCosts.uniform(attention=3, experts=4, dispatch=0.1)  # as if nothing had to be waited for
    for exchange in (build_exchange(group), Slow(build_exchange(group), seed=rank)):
        model = models.build(group)
        program = build_schedule(name, microbatches=4)
        engine = make(model, program, mesh=mesh, exchange=exchange, costs=costs, timeout=20)
        with all_tries():  # the plan has weight gradients that are placed late
            result = engine.step(data[0], target=data[1])
        planned = [node for node in engine.plan.ranks[0] if node.resource is Resource.COMPUTE]
        found = [span.node for span in result.overlap.spans if span.node.resource is Resource.COMPUTE]
        for weight in (True, False):
            kept = [[node for node in order if (node.kind is Kind.W) is weight] for order in (planned, found)]
            problems += ["another order"] * (kept[0] != kept[1])
        placed = program.splits(0) or name == "auto"
        if isinstance(exchange, Slow) and (found == planned) is not placed:
            problems.append("nothing was taken early, or what the program or the search has placed")
        if result.peak_held > engine.plan.peak_held:
            problems.append(f"{result.peak_held} held, planned {engine.plan.peak_held}")
        found_gradients = models.gradients(model)
        problems += models.equal(found_gradients, reference or found_gradients)
        reference = found_gradients
    assert not problems, problems
