"""Exchanges on streams beside compute: the order of everything is kept whatever takes how long."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from overlap1f1b.engine import Engine
from overlap1f1b.engine.play.device import Carveout, Watch
from overlap1f1b.plan import Node, NodeCosts, Op, Overlap, Resource, cost_key
from overlap1f1b.schedule import build_schedule
from overlap1f1b.transport.exchange import Exchange
from overlap1f1b.transport.loopback import LoopbackExchange
from overlap1f1b.transport.streams import ThreadStream
from tests import models

CPU = torch.device("cpu")
COSTS = NodeCosts.uniform(attention=3, experts=4, dispatch=5, counts=0.4, dense=1)


class Noise:
    """Delays of a pattern: most jobs go at once, some wait up to a millisecond."""

    def __init__(self) -> None:
        self.random = random.Random(0)

    def __call__(self) -> float:
        return self.random.random() * 1e-3 if self.random.random() < 0.15 else 0.0


def loopback(noise: Noise) -> LoopbackExchange:
    out, back, control = (ThreadStream(name, delay=noise) for name in ("out", "back", "control"))
    return LoopbackExchange(CPU, streams=(out, back, control))


def engine(microbatches: int, exchange: Exchange | None, overlap: Overlap, **options: Any) -> Engine:
    name, warmup = ("sequential", {}) if overlap == "serial" else ("combined_1f1b", {"extra_warmup": 1})
    program = build_schedule(name, microbatches=microbatches, **warmup)  # type: ignore[arg-type]
    return Engine(
        models.build(layers=1, dropout=0.1),
        program,
        loss_fn=models.loss_fn,
        overlap=overlap,
        exchange=exchange,
        **options,
    )


def step(engine: Engine, model: torch.nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    engine.step(data[0], target=data[1])
    return models.gradients(model)


def model_of(engine: Engine) -> torch.nn.Module:
    return torch.nn.Sequential(*engine.stages[0].blocks)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [2, 3])
def test_gradients_are_the_same_under_every_pattern_of_delays(overlap: Overlap) -> None:
    """A wait that were missing would read rows that are not there yet; a tensor let go too early raises."""
    data = models.batch(3)
    plain = engine(3, None, "serial", costs=COSTS)
    wanted = step(plain, model_of(plain), data)
    noise = Noise()
    overlapped = engine(3, loopback(noise), overlap, costs=COSTS)
    model = model_of(overlapped)
    for pattern in range(100):
        noise.random.seed(pattern)
        assert not models.equal(step(overlapped, model, data), wanted), pattern


def test_a_step_is_measured_by_the_device_and_read_late() -> None:
    """With a clock of its own, here the thread's in other units, spans are those of the streams."""
    settled = []
    watch = Watch(lambda: 7 * time.perf_counter(), lambda a, b: (b - a) / 7, lambda: settled.append(True))
    exchange = LoopbackExchange(CPU, gbps=1e-3)
    overlapped = engine(2, exchange, 2, costs=COSTS)
    player = overlapped.player
    player._watch = watch
    for lane in player.lanes.values():
        lane.stamp = watch.stamp
    result = overlapped.step(*models.batch(2)[:1], target=models.batch(2)[1])
    assert not settled
    spans = {span.node: span for span in result.overlap.spans if span.node.resource is Resource.COMPUTE}
    assert settled == [True]
    assert set(spans) == {node for node in overlapped.plan.nodes if node.resource is Resource.COMPUTE}
    seen = {span.node: span for span in overlapped.player.measured()()}
    assert all(abs(spans[node].start - seen[node].start) < 0.05 for node in spans)


@contextmanager
def _slowly(node: Node) -> Iterator[None]:
    yield
    time.sleep(0.02)


def test_the_streams_know_when_an_exchange_ended() -> None:
    """It ends when its bytes are there, not when compute asks for them."""
    overlapped = engine(2, LoopbackExchange(CPU), 2, costs=COSTS)
    overlapped.player.around = _slowly
    data = models.batch(2)
    result = overlapped.step(data[0], target=data[1])
    rows = [span for span in result.overlap.spans if span.node.op in (Op.DISPATCH, Op.COMBINE)]
    assert len(rows) == 2 * 2 * 2
    assert sorted(span.end - span.start for span in rows)[len(rows) // 2] < 0.015


def test_costs_are_measured_over_the_loopback() -> None:
    measured = engine(2, LoopbackExchange(CPU, gbps=1e-3), 3)
    data = models.batch(2)
    sizes = 2 * 7 * models.K * models.H * 4
    for _ in range(2):
        measured.step(data[0], target=data[1])
    assert measured.costs is not None
    rows = [node for node in measured.plan.nodes if node.op is Op.DISPATCH]
    assert all(measured.costs.by_node[cost_key(node)] >= sizes / 1e6 for node in rows)  # type: ignore[operator]


def test_compute_leaves_multiprocessors_to_exchanges_in_flight() -> None:
    told: list[int | None] = []
    carveout = Carveout(16, told.append)
    carveout.launched()
    carveout.launched()
    carveout.awaited()
    assert told == [16]
    carveout.awaited()
    assert told == [16, None]
    carveout.launched()
    carveout.clear()
    carveout.clear()
    assert told == [16, None, 16, None]
    silent = Carveout(0, told.append)
    silent.launched()
    assert len(told) == 4


@pytest.mark.parametrize("asked", [False, True])
def test_a_step_leaves_multiprocessors_only_if_asked(monkeypatch: pytest.MonkeyPatch, asked: bool) -> None:
    told: list[int | None] = []
    monkeypatch.setattr(torch._C, "_set_sm_carveout_experimental", told.append)
    exchange = LoopbackExchange(CPU)
    exchange.sms = 12
    overlapped = engine(4, exchange, 3, costs=COSTS, **({"carveout": True} if asked else {}))
    data = models.batch(4)
    overlapped.step(data[0], target=data[1])
    assert bool(told) == asked
    assert told[::2] == [12] * (len(told) // 2)
    assert told[1::2] == [None] * (len(told) // 2)
