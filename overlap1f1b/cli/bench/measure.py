"""Measures the rows: compute only, exchange only, both without dependencies, and every program, interleaved."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlap1f1b.cli.bench.exchanges import AnsweringExchange, RecordingExchange, Replay, real_exchange, settle
from overlap1f1b.cli.bench.gradients import compare
from overlap1f1b.cli.bench.hollow import hollow
from overlap1f1b.cli.bench.memory import peak_bytes
from overlap1f1b.cli.bench.rows import Row, Samples, ablation, table_of
from overlap1f1b.cli.options import BenchOptions
from overlap1f1b.cli.ranks import Rank
from overlap1f1b.cli.rate import Balanced, parse_wire
from overlap1f1b.cli.wire import INTERFACE, shape
from overlap1f1b.cli.workload import build_model, load_corpus, loss_fn
from overlap1f1b.engine import Engine, LossFunction, StepResult
from overlap1f1b.engine.stages import Model
from overlap1f1b.moe import set_auxiliary_scale
from overlap1f1b.plan import NodeCosts, Op, Recompute, parse_overlap

FRAMES = 0.956  # share of a shaped link's rate that is left for TCP's payload
Report = Callable[[str], None]


@dataclass
class Bench:
    """One rank's part of the benchmark.

    Args:
        options: From the command line.
        rank: This process.
        report: Told what is being done.
    """

    options: BenchOptions
    rank: Rank
    report: Report

    def __post_init__(self) -> None:
        options, rank = self.options, self.rank
        self.overlap = parse_overlap(options.overlap)
        self.model, self._given, self._loss_fn = self._built()
        corpus = load_corpus(options)
        self.inputs, self.target = corpus.batch(
            0, rank.rank, batch=options.batch, sequence=options.sequence, seed=options.seed
        )
        self.real, self.loopback_rate = real_exchange(options, rank)
        self.sender = rank.rank if options.exchange is None else None
        self.recording = RecordingExchange(self.real)
        self.pace: NodeCosts | None = None

    def run(self) -> dict[str, Any]:
        """Everything, as the JSON of design and documentation; times are the slowest rank's."""
        rows = ablation(self.options.microbatches, self.overlap, self.options.program())
        with self.ready(rows) as (engines, costs, rate):
            timed = self._rounds(rows, engines, costs)
        self.report("comparing gradients")
        checked = self._check(rows, costs)
        return self._summary(rows, timed, checked, engines, costs, rate)

    @contextmanager
    def ready(self, rows: list[Row]) -> Iterator[tuple[dict[str, Engine], NodeCosts, float | None]]:
        """Engines of the rows, their costs and the wire's rate, while compute and wire are as asked for."""
        self.report("measuring nodes")
        serial = self.engine(rows[0])
        for _ in range(3):
            self.step(serial)
        if self.options.compute == "timed":
            self.pace = serial.costs
        with self._computing():
            rate = self._shape_wire(rows, serial.costs)
            self.report("measuring nodes on the wire")
            costs = self._calibrated(rows[0])
            yield {row.key: self.engine(row, costs) for row in rows}, costs, rate

    def _built(self) -> tuple[nn.Module, Model, LossFunction]:
        """A module with all parameters, what the engine plays, and its loss."""
        model = build_model(self.options, self.rank)
        return model, model, loss_fn

    def _phases(self) -> dict[str, Callable[[], float]]:
        """What else is measured in every round."""
        return {}

    def engine(self, row: Row, costs: NodeCosts | None = None, recompute: Recompute | None = None) -> Engine:
        return Engine(
            self._given,
            row.program,
            mesh=self.rank.mesh,
            loss_fn=self._loss_fn,
            overlap=row.overlap,
            recompute=recompute or self.options.recompute,
            capacity=self.options.capacity,
            overflow=self.options.overflow,
            costs=costs,
            reduce=self.options.reduce,
            timeout=self.options.timeout,
            exchange=self.recording,
            pace=self.pace,
        )

    def step(self, engine: Engine) -> tuple[float, StepResult]:
        """One step from a common start; seconds until the slowest rank is done."""
        self._clear_gradients()
        self.recording.clear()
        self._meet()
        start = time.perf_counter()
        result = engine.step(self.inputs, target=self.target)
        settle(self.rank.device)
        return slowest(time.perf_counter() - start, self.rank), result

    def _meet(self) -> None:
        if self.rank.group is not None:
            dist.barrier(self.rank.group)

    def _clear_gradients(self) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad.zero_()

    def _computing(self) -> AbstractContextManager[None]:
        return hollow(self.model) if self.options.compute == "timed" else nullcontext()

    def _calibrated(self, row: Row) -> NodeCosts:
        engine = self.engine(row)
        while engine.costs is None:
            self.step(engine)
        return engine.costs

    def _shape_wire(self, rows: list[Row], costs: NodeCosts | None) -> float | None:
        """Shapes this rank's end of the wire and returns the rate in bits per second."""
        if self.options.wire is None:
            return None
        rate = parse_wire(self.options.wire)
        if isinstance(rate, Balanced):
            self.report("finding the rate at which exchange equals compute")
            default = self.engine(next(row for row in rows if row.default), costs)
            self.step(default)
            compute = self._compute_only(default)
            seconds = median(compute() for _ in range(3))
            sent = slowest(float(sum(size.sent_bytes(self.sender) for size in self._sizes)), self.rank)
            rate = 8 * sent / seconds / FRAMES * rate.factor
        self._meet()
        shape(os.environ[INTERFACE], rate)
        self._meet()
        return rate

    def _compute_only(self, recorded: Engine) -> Callable[[], float]:
        """The step of an engine that has just been recorded, every exchange answered locally."""
        answers = AnsweringExchange(self.real.ranks, self.real.rank, self.recording.counts_received)
        rows = [node for node in recorded.plan.nodes if node.op in (Op.DISPATCH, Op.COMBINE)]
        self._sizes = [self.recording.sizes[node.tag] for node in rows]
        engine = Engine(
            self._given,
            recorded.program,
            loss_fn=self._loss_fn,
            recompute=self.options.recompute,
            capacity=self.options.capacity,
            overflow=self.options.overflow,
            plan=recorded.plan.without_reductions(),
            exchange=answers,
            pace=self.pace,
        )
        return lambda: self.step(engine)[0]

    def _rounds(self, rows: list[Row], engines: dict[str, Engine], costs: NodeCosts) -> dict[str, Any]:
        default = next(engines[row.key] for row in rows if row.default)
        self.step(default)
        compute_only = self._compute_only(default)
        replay = Replay(self.real, self._sizes, self.rank.device)

        def exchange_only() -> float:
            self._meet()
            return slowest(replay.run(), self.rank)

        def contended() -> float:
            beside = replay.beside()
            self._meet()
            start = time.perf_counter()
            beside.start()
            compute_only()
            beside.join()
            return slowest(time.perf_counter() - start, self.rank)

        phases = {"compute_only": compute_only, "exchange_only": exchange_only, "contended": contended}
        if self.options.alone:
            phases = {"plain": self._plain}
        phases |= self._phases()
        bounds: dict[str, list[float]] = {name: [] for name in phases}
        samples = {row.key: Samples() for row in rows}
        for turn in range(self.options.rounds + 1):  # the first is for warming up
            self.report(f"round {turn} of {self.options.rounds}" if turn else "warming up")
            for name, measure in phases.items():
                seconds = measure()
                if turn:
                    bounds[name].append(seconds)
            for row in rows:
                seconds, result = self.step(engines[row.key])
                if turn:
                    samples[row.key].seconds.append(seconds)
                    samples[row.key].exposed.append(slowest(result.overlap.exposed, self.rank))
                    samples[row.key].hidden.append(-slowest(-result.overlap.hidden_fraction, self.rank))
        return {"bounds": {name: median(values) for name, values in bounds.items()}, "samples": samples}

    def _plain(self) -> float:
        """A plain loop of forward and backward over the same modules; seconds."""
        self._clear_gradients()
        count = self.options.microbatches
        set_auxiliary_scale(self.model, 1 / count)
        start = time.perf_counter()
        for x, y in zip(self.inputs.chunk(count), self.target.chunk(count), strict=True):
            (loss_fn(self.model(x), y) / count).backward()
        settle(self.rank.device)
        return time.perf_counter() - start

    def _check(self, rows: list[Row], costs: NodeCosts) -> dict[str, dict[str, Any]]:
        """Gradients of every row against those of the first, with real compute, and the memory that each takes.

        Where something is recomputed, against the first without it, and the memory without it, too.
        """
        self.pace = None
        reference: list[Tensor] = []
        found: dict[str, dict[str, Any]] = {}

        def run(row: Row, recompute: Recompute) -> tuple[int, list[Tensor]]:
            engine = self.engine(row, costs, recompute)
            memory = peak_bytes(self.rank.device, lambda: self.step(engine))
            grads = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
            return int(slowest(float(memory), self.rank)), grads

        for row in rows:
            without = {}
            if self.options.recompute != "none":
                without["peak_without_recompute_bytes"], grads = run(row, "none")
                reference = reference or grads
            memory, grads = run(row, self.options.recompute)
            reference = reference or grads
            equal, difference = compare(grads, reference)
            difference = slowest(difference, self.rank)
            found[row.key] = {
                "grads_equal": not slowest(float(not equal), self.rank),
                "max_grad_diff": difference if math.isfinite(difference) else None,  # JSON knows no infinity
                "peak_activation_bytes": memory,
            } | without
        return found

    def _summary(
        self,
        rows: list[Row],
        timed: dict[str, Any],
        checked: dict[str, dict[str, Any]],
        engines: dict[str, Engine],
        costs: NodeCosts,
        rate: float | None,
    ) -> dict[str, Any]:
        bounds = timed["bounds"]
        if self.options.alone:  # nothing is exchanged: the plain loop is what the engine is measured against
            bounds |= dict.fromkeys(("compute_only", "contended"), bounds["plain"]) | {"exchange_only": 0.0}
        bounds["bound"] = max(bounds["compute_only"], bounds["exchange_only"])
        tokens = self.options.batch * self.options.sequence * self.rank.size
        table = table_of(rows, timed["samples"], engines, costs, bounds, tokens)
        rate, frames = rate or self.loopback_rate, FRAMES if self.options.exchange is None else 1.0
        sent = max(s.sent_bytes(self.sender) for s in self._sizes) if self._sizes else 0
        total = sum(s.sent_bytes(self.sender) for s in self._sizes)
        return {
            "wire": {
                "kind": "host" if self.options.exchange else "loopback" if rate is None else "shaped",
                "rate_gbps": None if rate is None else rate / 1e9,
                "bytes_sent": int(slowest(float(total), self.rank)),
                "largest_exchange_bytes": int(slowest(float(sent), self.rank)),
                "bytes_over_rate_ms": None if rate is None else 8e3 * slowest(float(total), self.rank) / rate / frames,
            },
            "compute": self.options.compute,
            "plain_ms": 1e3 * bounds["plain"] if "plain" in bounds else None,
            "compute_only_ms": 1e3 * bounds["compute_only"],
            "exchange_only_ms": 1e3 * bounds["exchange_only"],
            "bound_ms": 1e3 * bounds["bound"],
            "contended_ms": 1e3 * bounds["contended"],
            "rows": [found | checked[row.key] for row, found in zip(rows, table, strict=True)],
        }


def slowest(value: float, rank: Rank) -> float:
    """The largest of the ranks' values."""
    if rank.group is None:
        return value
    largest = torch.tensor(value, dtype=torch.float64, device=rank.device)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=rank.group)
    return largest.item()
