"""A recorder writes every node, action and wait of a step once, and nothing where there is none."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from overlap1f1b import NodeCosts, build_schedule
from overlap1f1b.plan import ActionRange, Label, NodeRange, Op, Resource, StepRange, parse_node, parse_range
from overlap1f1b.record.recorder import Recorder, TorchRanges
from overlap1f1b.schedule import Kind
from overlap1f1b.transport import devices
from tests.engines import make
from tests.models import batch, build, loss_fn
from tests.ranks import over


class Log:
    """A writer that keeps what it is told, and by which thread."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []
        self.others: list[tuple[str, str]] = []
        self.thread = threading.get_ident()
        self.depth = 0

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        assert threading.get_ident() == self.thread
        self.told.append(("nested", name))
        self.depth += 1
        try:
            yield
        finally:
            assert threading.get_ident() == self.thread
            self.depth -= 1

    def range_start(self, name: str) -> str:
        (self.told if threading.get_ident() == self.thread else self.others).append(("start", name))
        return name

    def range_end(self, handle: str) -> None:
        (self.told if threading.get_ident() == self.thread else self.others).append(("end", handle))

    @property
    def nesting(self) -> list[Any]:
        return [parse_range(name) for what, name in self.told if what == "nested"]


@over(2)
def test_two_ranks(rank: int, size: int, tmp_path: Path) -> None:
    """Steps of two ranks that share experts, with a recorder and after it."""
    mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("pp", "dp", "ep"))
    program = build_schedule("combined_1f1b", microbatches=3)
    engine = make(build(mesh.get_group("ep")), program, mesh=mesh, loss_fn=loss_fn, overlap=3, tries=0)
    inputs, target = batch(3, seed=rank)
    for _ in range(2):
        engine.step(inputs, target=target)
    log = Log()
    with Recorder(engine, log, first=3) as recorder:
        with pytest.raises(ValueError, match="recorded already; allowed: one recorder at a time"):
            Recorder(engine, log).__enter__()
        results = [engine.step(inputs, target=target) for _ in range(2)]
        engine.evaluate(inputs, target=target)
    told = len(log.told), len(log.others)
    engine.step(inputs, target=target)
    assert (len(log.told), len(log.others)) == told, "without a recorder nothing is written"
    assert all(lane.listener is None for lane in engine.connection.lanes)
    assert log.depth == 0

    nodes = engine.plan.ranks[0]
    label, *found = log.nesting
    assert label == Label(rank, {"pp": (0, 1), "dp": (0, 1), "ep": (rank, 2)})
    assert [r.number for r in found if isinstance(r, StepRange)] == [3, 4]
    issued = [r.node for r in found if isinstance(r, NodeRange) and r.kind == "node"]
    for step in (issued[: len(nodes)], issued[len(nodes) : 2 * len(nodes)]):
        for early in (True, False):  # weight gradients may come before others, while those wait
            kept, planned = (
                [n for n in order if (n.kind is Kind.W and n.op is not Op.REDUCE) is early] for order in (step, nodes)
            )
            assert kept == planned, "each node once a step, in the order of the plan"
    waited = [r.node for r in found if isinstance(r, NodeRange) and r.kind == "wait"]
    assert waited
    assert all(node.resource is not Resource.COMPUTE for node in waited)

    actions = [str(ActionRange(action)) for action in program.actions(0)]
    for what in ("start", "end"):
        written = [name for told, name in log.told if told == what]
        assert sorted(written[: 2 * len(actions)]) == sorted(actions * 2)
    away = [
        node for node in nodes if node.resource not in (Resource.COMPUTE, Resource.CONTROL)
    ]  # counts have no thread
    for what in ("start", "end"):
        flown = [name for told, name in log.others if told == what]
        expected = [str(NodeRange("flight", node)) for node in away]
        assert sorted(flown[: 2 * len(away)]) == sorted(expected * 2)

    recorder.save(tmp_path / f"rank{rank}.json")
    saved = json.loads((tmp_path / f"rank{rank}.json").read_text())
    assert (saved["format"], saved["version"], saved["rank"]) == ("overlap1f1b-spans", 1, rank)
    assert saved["mesh"] == {"pp": [0, 1], "dp": [0, 1], "ep": [rank, 2]}
    assert [step["step"] for step in saved["steps"]] == [3, 4]
    for step, kept, result in zip(saved["steps"], recorder.steps, results, strict=True):
        assert all(0 <= start <= end <= step["seconds"] for _, _, start, end in step["spans"])
        flights = {s.range.node: s.end - s.start for s in kept.spans if s.range[0] == "flight"}  # type: ignore[union-attr]
        seen = {
            span.node: span.end - span.start
            for span in result.overlap.spans
            if span.node.resource is not Resource.COMPUTE
        }
        assert {n: t for n, t in flights.items() if n in seen} == pytest.approx(seen)
        assert {parse_node(text) for kind, text, *_ in step["spans"] if kind == "node"} == set(nodes)
        assert {parse_node(text) for kind, text, *_ in step["spans"] if kind == "flight"} == {
            node for node in nodes if node.resource is not Resource.COMPUTE
        }


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise RuntimeError("as it was told")
        return x * self.weight


def test_one_rank_exchanges_nothing_and_a_step_that_fails_leaves_no_record_and_no_open_range() -> None:
    module = Failing()
    costs = NodeCosts.uniform(attention=1, experts=1, dispatch=1, dense=1)
    program = build_schedule("sequential", microbatches=2)
    engine = make([module], program, loss_fn=lambda x, _: x.sum(), costs=costs)
    inputs, log = torch.ones(2, 1), Log()
    with Recorder(engine, log) as recorder:
        engine.step(inputs, target=inputs)
        module.fails = True
        with pytest.raises(RuntimeError, match="as it was told"):
            engine.step(inputs, target=inputs)
        module.fails = False
        engine.step(inputs, target=inputs)
    assert log.depth == 0
    assert [step.number for step in recorder.steps] == [1, 2]
    starts, ends = ([name for told, name in log.told if told == what] for what in ("start", "end"))
    assert sorted(starts) == sorted(ends)
    assert not [span for step in recorder.steps for span in step.spans if getattr(span.range, "kind", "") == "flight"]


def test_ranges_nest_under_torchs_profiler() -> None:
    writer = TorchRanges()
    with writer.range("unseen"):
        pass
    with profile(activities=[ProfilerActivity.CPU]) as profiler, writer.range("outer"):
        for name in ("first", "second"):
            with writer.range(name):
                writer.range_end(writer.range_start("apart"))
    events = {event.name: event for event in profiler.events()}
    assert events.keys() == {"outer", "first", "second"}
    assert all(events[name].cpu_parent is events["outer"] for name in ("first", "second"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_nvtx() -> None:
    writer = devices.RANGES
    with writer.range("outer"):
        handle = writer.range_start("apart")
    writer.range_end(handle)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"engine": nn.Linear(2, 2)}, "engine=Linear(in_features=2, out_features=2, bias=True); allowed: Engine"),
        ({"writer": None}, "writer=None; allowed: RangeWriter"),
        ({"writer": "torch"}, "writer='torch'; allowed: RangeWriter"),
        ({"first": "1"}, "first='1'; allowed: a whole number, 0 or more"),
    ],
)
def test_values_of_another_kind(given: dict[str, Any], message: str) -> None:
    engine = make(build(), build_schedule("sequential", microbatches=2))
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Recorder(**{"engine": engine, "writer": TorchRanges(), **given})
    with pytest.raises(ValueError, match=r"^path=5; allowed: str or PathLike$"):
        Recorder(engine, devices.RANGES).save(5)  # type: ignore[arg-type]
