"""Exchanges on streams beside compute: the order of everything is kept whatever takes how long."""

import json
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from overlap1f1b.engine import DeviceOptions, Engine, StepResult
from overlap1f1b.plan import Node, NodeCosts, Op, Overlap, Resource, cost_key, parse_node, row_bytes
from overlap1f1b.record.recorder import Recorder
from overlap1f1b.schedule import Kind, build_schedule
from overlap1f1b.transport import devices
from overlap1f1b.transport.devices import Watch, watch_of
from overlap1f1b.transport.exchange import Exchange
from overlap1f1b.transport.loopback import LoopbackExchange
from tests import models
from tests.engines import make
from tests.lagging import loopback
from tests.observing import Around, Last
from tests.tiers import wide

CPU = torch.device("cpu")
COSTS = NodeCosts.uniform(attention=3, experts=4, dispatch=5, counts=0.4, dense=1)


def engine(microbatches: int, exchange: Exchange | None, overlap: Overlap, **options: Any) -> Engine:
    name, warmup = ("sequential", {}) if overlap == "serial" else ("combined_1f1b", {"extra_warmup": 1})
    program = build_schedule(name, microbatches=microbatches, **warmup)  # type: ignore[arg-type]
    return make(models.build(layers=1, dropout=0.1), program, overlap=overlap, exchange=exchange, **options)


def step(engine: Engine) -> StepResult:
    torch.manual_seed(1)
    return engine.step(*models.batch(engine.program.microbatches))


def gradients(engine: Engine) -> dict[str, torch.Tensor]:
    """Of one step."""
    model = torch.nn.Sequential(*engine.stages[0].blocks)
    model.zero_grad()
    step(engine)
    return models.gradients(model)


HOST = Watch(time.perf_counter, lambda a, b: b - a, lambda: None)


def clocked(engine: Engine, watch: Watch = HOST) -> None:
    """Let an engine take the times of its nodes by another clock, as by a device's."""
    connection = engine.connection
    connection.links = replace(connection.links, watch=watch)
    for lane in connection.links.lanes.values():
        lane.stamp = watch.stamp


@pytest.mark.parametrize("overlap", [2, *wide(3)])
def test_gradients_are_the_same_under_every_pattern_of_delays(overlap: Overlap) -> None:
    """A wait that were missing would read rows that are not there yet; a tensor let go too early raises."""
    wanted, noise = gradients(engine(3, None, "serial", costs=COSTS)), random.Random()
    late = lambda: noise.random() * 1e-3 if noise.random() < 0.15 else 0.0  # noqa: E731
    overlapped = engine(3, loopback(late), overlap, costs=COSTS)
    for pattern in range(40):
        noise.seed(pattern)
        assert not models.equal(gradients(overlapped), wanted), pattern


def test_a_step_is_measured_by_the_device_and_read_late() -> None:
    """With a clock of its own, here the thread's in other units, spans are those of the streams."""
    settled = []
    watch = Watch(lambda: 7 * time.perf_counter(), lambda a, b: (b - a) / 7, lambda: settled.append(True))
    overlapped = engine(2, LoopbackExchange(CPU, gbps=1e-3), 2, costs=COSTS)
    overlapped.observers.append(Last())  # it asks for every node
    clocked(overlapped, watch)
    result = step(overlapped)
    assert not settled
    spans = {span.node: span for span in result.overlap.spans if span.node.resource is Resource.COMPUTE}
    assert settled == [True]
    assert set(spans) == {node for node in overlapped.plan.nodes if node.resource is Resource.COMPUTE}
    seen = {span.node: span for span in result.times.spans()}
    assert all(abs(spans[node].start - seen[node].start) < 0.05 for node in spans)


def test_launches_are_measured_without_waits_for_counts() -> None:
    """Counts take 50 ms; on a CPU no launch is measured."""
    overlapped = engine(2, loopback(lambda: 0.0, lambda: 0.05), 2, costs=COSTS)
    assert step(overlapped).times.launches == []
    clocked(overlapped)
    overlapped.observers.append(Last())  # it asks for every node
    begun = time.perf_counter()
    launches = step(overlapped).times.launches
    assert [span.node for span in launches] == list(overlapped.plan.nodes)
    assert all(begun <= span.start <= span.end <= time.perf_counter() for span in launches)
    rows = [span.end - span.start for span in launches if span.node.op is Op.DISPATCH and span.node.kind is Kind.F]
    assert len(rows) == 2
    assert min(rows) < 0.04
    waited = [b.start - a.end for a, b in pairwise(launches)]
    assert max(waited) > 0.02  # this is the wait


@contextmanager
def _slowly(node: Node) -> Iterator[None]:
    yield
    time.sleep(0.02)


def test_the_streams_know_when_an_exchange_ended() -> None:
    """It ends when its bytes are there, not when compute asks for them."""
    overlapped = engine(2, LoopbackExchange(CPU), 2, costs=COSTS)
    overlapped.observers.append(Around(_slowly))
    result = step(overlapped)
    rows = [span for span in result.overlap.spans if span.node.op in (Op.DISPATCH, Op.COMBINE)]
    assert len(rows) == 2 * 2 * 2
    assert sorted(span.end - span.start for span in rows)[len(rows) // 2] < 0.015


def test_costs_are_measured_over_the_loopback() -> None:
    measured = engine(2, LoopbackExchange(CPU, gbps=1e-3), 3)
    sizes = 2 * 7 * row_bytes(models.H, models.K, 4, 4)
    for _ in range(2):
        step(measured)
    rows = [node for node in measured.plan.nodes if node.op is Op.DISPATCH]
    assert all(measured.costs.by_node[cost_key(node)] >= sizes / 1e6 for node in rows)  # type: ignore[operator]


def test_the_device_of_the_model_sleeps_whichever_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[object] = []
    asleep: list[list[object]] = []

    @contextmanager
    def within(stream: object) -> Iterator[None]:
        entered.append(stream)
        yield
        entered.pop()

    gpu = SimpleNamespace(
        current_stream=lambda device: f"the stream of {device}",
        stream=within,
        _sleep=lambda cycles: asleep.append(list(entered)),
    )
    monkeypatch.setattr(devices, "KINDS", {"cuda": gpu})
    watch = watch_of(torch.device("cuda", 1))
    watch.hold()
    assert asleep == [["the stream of cuda:1"]]


@pytest.mark.parametrize("wanted", [True, False])
def test_products_leave_two_multiprocessors_for_each_block_of_rows(
    monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    told: list[int | None] = []
    monkeypatch.setattr(torch._C, "_set_sm_carveout_experimental", told.append)
    monkeypatch.setattr(torch._C, "_get_sm_carveout_experimental", lambda: 5)
    exchange = LoopbackExchange(CPU)
    exchange.sms = 12
    step(engine(4, exchange, 3, costs=COSTS, verify=False, device=DeviceOptions(carveout=wanted)))
    assert told == ([24, 5] if wanted else [])


def test_a_record_of_a_device_has_the_times_of_both_clocks(tmp_path: Path) -> None:
    overlapped = engine(2, LoopbackExchange(CPU), 2, costs=COSTS)
    clocked(overlapped)
    with Recorder(overlapped, MagicMock()) as recorder:
        for _ in range(2):
            result = step(overlapped)
    recorder.save(tmp_path / "rank0.json")
    *_, recorded = json.loads((tmp_path / "rank0.json").read_text())["steps"]
    by_device = {text: (start, end) for kind, text, start, end in recorded["spans"] if kind == "device"}
    assert set(by_device) == {str(span.node) for span in result.overlap.spans}
    for kind, text, start, end in recorded["spans"]:
        if kind == "node" and text in by_device and parse_node(text).resource is Resource.COMPUTE:  # type: ignore[union-attr]
            assert start - 0.01 <= by_device[text][0] <= by_device[text][1] <= end + 0.01
