"""Measures schedules over several pipeline ranks, torch's own beside them, rows interleaved in one process."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlap1f1b.cli.bench.exchanges import RecordingExchange, Replay
from overlap1f1b.cli.bench.gradients import compare
from overlap1f1b.cli.bench.hollow import hollow
from overlap1f1b.cli.bench.measure import FRAMES, Report
from overlap1f1b.cli.bench.memory import peak_bytes
from overlap1f1b.cli.bench.peers import PEERS, Peer
from overlap1f1b.cli.bench.rows import Row, Samples, pipeline_rows
from overlap1f1b.cli.bench.timed import TimedCompute, operations_per_second
from overlap1f1b.cli.launch import cores
from overlap1f1b.cli.options import BenchOptions
from overlap1f1b.cli.ranks import Rank
from overlap1f1b.cli.rate import Balanced, parse_wire
from overlap1f1b.cli.wire import INTERFACE, shape
from overlap1f1b.cli.workload import block_weights, build_model, load_corpus, loss_fn, model_config
from overlap1f1b.engine import Engine, blocks_of
from overlap1f1b.moe import MoETransformer, set_auxiliary_scale
from overlap1f1b.plan import Node, NodeCosts, Op, Recompute, Resource, parse_overlap
from overlap1f1b.schedule import Program
from overlap1f1b.simulation import simulate
from overlap1f1b.transport.exchange import build_exchange, lane_groups


@dataclass
class PipelineBench:
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
        self.rows = pipeline_rows(options, parse_overlap(options.overlap))
        self.model = build_model(options, rank)
        self.blocks = blocks_of(self.model)
        self.inputs, self.target = load_corpus(options).batch(
            0, rank.data_rank, batch=options.batch, sequence=options.sequence, seed=options.seed
        )
        self.real = build_exchange(rank.group, *(lane_groups(rank.group, 3) if rank.group else ()))
        self.recording = RecordingExchange(self.real)
        self.compute = TimedCompute(self._speed() if options.compute == "timed" else math.inf)

    def run(self) -> dict[str, Any]:
        """Everything, as the JSON of design and documentation; times are the slowest rank's."""
        peers = {name: self._peer(name) for name in PEERS if self.options.peers}
        with self.ready(self.rows) as (engines, rate, seconds):
            default = next(engines[row.key] for row in self.rows if row.default)
            busy, began = time.process_time(), time.perf_counter()
            measured = self._rounds(engines, peers)
            busy, lasted = time.process_time() - busy, time.perf_counter() - began
            share = _processor_share(busy / lasted, self.rank)
            exchange_only = median(self._exchange_only(default) for _ in range(3))
        self.report("comparing gradients")
        checked = self._check(engines, peers)
        return self._summary(engines, peers, measured, checked, rate, seconds, exchange_only, share)

    @contextmanager
    def ready(self, rows: Sequence[Row]) -> Iterator[tuple[dict[str, Engine], float | None, float]]:
        """Engines of the rows, the wire's rate and seconds of compute, while compute and wire are as asked for."""
        engines = {row.key: self.engine(row) for row in rows}
        with hollow(self.model, self.compute) if self.options.compute == "timed" else nullcontext():
            rate, seconds = self._shape_wire(next(engines[row.key] for row in rows if row.default))
            by_program: dict[Program, NodeCosts] = {}
            for row in rows:
                self.report(f"measuring nodes of {row.key}")
                engine = engines[row.key]
                engine.costs = by_program.get(row.program)
                while engine.costs is None:
                    self.step(engine)
                by_program[row.program] = engine.costs
            yield engines, rate, seconds

    def _speed(self) -> float:
        """Operations a second that every rank's compute is timed by: those of the slowest, measured one by one."""
        self.report("measuring compute")
        options = replace(self.options, model=replace(self.options.model, layers=1, dense_layers=0))
        found = 0.0
        model = MoETransformer(model_config(options), seed=options.seed)
        count = options.microbatches
        for rank in range(self.rank.size):
            dist.barrier()
            if rank == self.rank.rank:
                found = operations_per_second(model, self.inputs.chunk(count)[0], self.target.chunk(count)[0])
        return -_largest(-found)

    def engine(self, row: Row, costs: NodeCosts | None = None, recompute: Recompute | None = None) -> Engine:
        return Engine(
            self.blocks,
            row.program,
            mesh=self.rank.mesh,
            loss_fn=loss_fn,
            weights=block_weights(self.options),
            overlap=row.overlap,
            recompute=recompute or self.options.recompute,
            capacity=self.options.capacity,
            overflow=self.options.overflow,
            costs=costs,
            reduce=self.options.reduce,
            timeout=self.options.timeout,
            exchange=self.recording,
        )

    def _peer(self, name: str) -> Peer:
        options, weights = self.options, block_weights(self.options)
        return Peer(name, self.blocks, weights, self.rank, options.microbatches, self.recording, options.timeout)

    def step(self, engine: Engine | Peer) -> tuple[float, Any]:
        """One step from a common start; seconds until the slowest rank is done."""
        _clear(engine)
        self.recording.clear()
        dist.barrier()
        start = time.perf_counter()
        if isinstance(engine, Engine):
            result: Any = engine.step(self.inputs, target=self.target)
        else:
            result = engine.step(self.inputs, self.target)
        return _largest(time.perf_counter() - start), result

    def _shape_wire(self, default: Engine) -> tuple[float | None, float]:
        """Shapes this rank's end of the wire; returns the rate in bits a second and the busiest rank's compute."""
        computed = []
        for turn in range(5):
            _, result = self.step(default)
            if turn > 1:  # the first measure nodes
                spans = [span for span in result.overlap.spans if span.node.resource is Resource.COMPUTE]
                computed.append(_largest(sum(span.end - span.start for span in spans)))
        seconds = median(computed)
        self._sizes = [self.recording.sizes[node.tag] for node in self._exchanges(default)]
        if self.options.wire is None:
            return None, seconds
        rate = parse_wire(self.options.wire)
        if isinstance(rate, Balanced):
            rate = 8 * self._sent() / seconds / FRAMES * rate.factor
        dist.barrier()
        shape(os.environ[INTERFACE], rate)
        dist.barrier()
        return rate, seconds

    def _exchanges(self, engine: Engine) -> list[Node]:
        """The exchanges of rows of this rank's step."""
        return [node for node in engine.plan.ranks[engine.rank] if node.op in (Op.DISPATCH, Op.COMBINE)]

    def _sent(self) -> float:
        return _largest(float(sum(size.sent_bytes(self.real.rank) for size in self._sizes)))

    def _exchange_only(self, default: Engine) -> float:
        dist.barrier()
        return _largest(Replay(self.real, self._sizes, self.rank.device).run()) if self.real.ranks > 1 else 0.0

    def _check(self, engines: dict[str, Engine], peers: dict[str, Peer]) -> dict[str, dict[str, Any]]:
        """Gradients of every row against a plain loop over the whole model, with real compute, and the memory taken."""
        count, size = self.options.microbatches, self.rank.data_ranks
        for parameter in self.model.parameters():
            parameter.grad = None
        set_auxiliary_scale(self.model, 1 / count)
        for x, y in zip(self.inputs.chunk(count), self.target.chunk(count), strict=True):
            (loss_fn(self.model(x), y) / count).backward()
        expected = {p: _taken(p) for p in self.model.parameters()}
        found = {}
        rows: dict[str, tuple[Engine | Peer, float]] = {key: (engine, size) for key, engine in engines.items()}
        rows |= {name: (peer, 1.0) for name, peer in peers.items()}
        for key, (engine, factor) in rows.items():
            memory = self._peak(engine)
            grads = {p: _taken(p) * factor for p in engine.parameters()}
            equal, difference = compare(list(grads.values()), [expected[p] for p in grads])
            difference = _largest(difference)
            found[key] = {
                "grads_equal": not _largest(float(not equal)),
                "max_grad_diff": difference if math.isfinite(difference) else None,
                "peak_activation_bytes": memory,
            }
        for row in self.rows if self.options.recompute != "none" else ():
            without = self.engine(row, engines[row.key].costs, "none")
            found[row.key]["peak_without_recompute_bytes"] = self._peak(without)
        return found

    def _peak(self, engine: Engine | Peer) -> int:
        _clear(engine)
        return int(_largest(float(peak_bytes(self.rank.device, lambda: self.step(engine)))))

    def _rounds(self, engines: dict[str, Engine], peers: dict[str, Peer]) -> dict[str, Samples]:
        every: dict[str, Engine | Peer] = {**engines, **peers}
        samples = {key: Samples() for key in every}
        for turn in range(self.options.rounds + 1):  # the first is for warming up
            self.report(f"round {turn} of {self.options.rounds}" if turn else "warming up")
            for key, engine in every.items():
                seconds, result = self.step(engine)
                if not turn:
                    continue
                samples[key].seconds.append(seconds)
                if isinstance(engine, Engine):
                    samples[key].exposed.append(_largest(result.overlap.exposed))
                    samples[key].hidden.append(-_largest(-result.overlap.hidden_fraction))
        return samples

    def _summary(
        self,
        engines: dict[str, Engine],
        peers: dict[str, Peer],
        measured: dict[str, Samples],
        checked: dict[str, dict[str, Any]],
        rate: float | None,
        seconds: float,
        exchange_only: float,
        share: float,
    ) -> dict[str, Any]:
        bound = max(seconds, exchange_only)
        tokens = self.options.batch * self.options.sequence * self.rank.data_ranks
        baseline = median(measured[self.rows[0].key].seconds)
        of_row = {row.key: row for row in self.rows}
        table = []
        for key, samples in measured.items():
            step, row = median(samples.seconds), of_row.get(key)
            pairs = "pairs" if key in peers and peers[key].registered else ""
            entry: dict[str, Any] = {"program": f"torch {key}", "overlap": pairs, "default": False, "order": ""}
            predicted = None
            if row is not None:
                engine = engines[key]
                assert engine.costs is not None
                predicted = 1e3 * simulate(engine.plan, engine.costs).makespan
                name = f"{row.program.name}" + f", {row.chunks} chunks" * (row.chunks > 1)
                entry = {"program": name, "overlap": str(row.overlap), "default": row.default}
                entry |= {"order": engine.plan.order}
            table.append(
                entry
                | samples.summary()
                | {
                    "tokens_per_s": tokens / step,
                    "over_bound": step / bound,
                    "predicted_ms": predicted,
                    "speedup": baseline / step,
                }
                | checked[key]
            )
        sent = self._sent()
        torchs = [median(measured[name].seconds) for name, peer in peers.items() if not peer.registered]
        ours = [median(measured[key].seconds) for key in engines]
        return {
            "wire": {
                "kind": "loopback" if rate is None else "shaped",
                "rate_gbps": None if rate is None else rate / 1e9,
                "bytes_sent": int(sent),
                "bytes_over_rate_ms": None if rate is None else 8e3 * sent / rate / FRAMES,
            },
            "compute": self.options.compute,
            "processor_share": share,
            "compute_only_ms": 1e3 * seconds,
            "exchange_only_ms": 1e3 * exchange_only,
            "bound_ms": 1e3 * bound,
            "contended_ms": None,
            "plain_ms": None,
            "best_over_peers": min(torchs) / min(ours) if torchs else None,
            "rows": table,
        }


def _clear(engine: Engine | Peer) -> None:
    for parameter in engine.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        else:
            parameter.grad.zero_()


def _taken(parameter: nn.Parameter) -> Tensor:
    """Its gradient, which it loses."""
    grad, parameter.grad = parameter.grad, None
    return torch.zeros_like(parameter) if grad is None else grad


def _processor_share(busy: float, rank: Rank) -> float:
    """Part of the processors' time that the ranks of one machine take, each this one's."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", rank.size))
    return _largest(busy) * local / cores()


def _largest(value: float) -> float:
    """The largest of all ranks' values."""
    largest = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()
