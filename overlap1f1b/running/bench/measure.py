"""The benchmark of one rank: its rows; bounds and rows in rounds; then gradients and memory.

:class:`Bench` measures a model on one stage. Subclasses say what differs over several pipeline ranks (``pipelines.py``)
and for a model of transformers (``hf.py``): the bounds, the reference gradients, and the peers.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from overlap1f1b.cut.options import Parts
from overlap1f1b.engine import Engine, StepResult
from overlap1f1b.learn.memory import peak_bytes
from overlap1f1b.moe import set_auxiliary_scale
from overlap1f1b.plan import NodeCosts, Op, Overlap, Recompute, pipeline_bound
from overlap1f1b.running.bench.compute import TimedCompute, operations_per_second
from overlap1f1b.running.exchanges import AnsweringExchange, RecordingExchange, Replay
from overlap1f1b.running.launch import cores
from overlap1f1b.running.options import BenchOptions
from overlap1f1b.running.ranks import Rank
from overlap1f1b.running.text import Corpus
from overlap1f1b.running.transformer import MoETransformer
from overlap1f1b.running.wire import Balanced, parse_loopback, parse_wire, shape
from overlap1f1b.running.workload import build, fed, loss_fn, model_config
from overlap1f1b.schedule import AUTO, DEFAULT_EXTRA_WARMUP, Program, build_schedule
from overlap1f1b.schedule.values import counted
from overlap1f1b.simulation import simulate
from overlap1f1b.terminal.output import Say
from overlap1f1b.transport import devices
from overlap1f1b.transport.exchange import Exchange, own_exchange
from overlap1f1b.transport.loopback import LoopbackExchange


class Variant(NamedTuple):
    """A program under an overlap; ``default`` marks the one that the options ask for."""

    program: Program
    overlap: Overlap
    default: bool = False

    @property
    def name(self) -> str:
        """Name of the program, with the number of chunks if a rank has several."""
        chunks = len(self.program.placement.places(0))
        return self.program.name + f", {chunks} chunks" * (chunks > 1)

    @property
    def key(self) -> str:
        return f"{self.name} · {self.overlap}"


def asked_for(options: BenchOptions) -> Variant:
    """Return the variant of ``--schedule`` and ``--overlap``."""
    return Variant(options.program(), options.overlap, default=True)


def variants_of(options: BenchOptions) -> dict[str, Variant]:
    """Return the rows for these options by their keys, the serial baseline first if there is one."""
    default = asked_for(options)
    rows = _pipelines(options, default) if options.pp > 1 else _ablation(options, default)
    return {row.key: row for row in rows} | {default.key: default}


def _ablation(options: BenchOptions, default: Variant) -> list[Variant]:
    """Return rows from the serial baseline through Megatron's pattern to three open actions, one change a row."""
    count = options.microbatches
    sequential = build_schedule("sequential", microbatches=count)
    merged = build_schedule("combined_1f1b", microbatches=count, extra_warmup=0)
    warmed = build_schedule("combined_1f1b", microbatches=count, extra_warmup=DEFAULT_EXTRA_WARMUP)
    return [
        Variant(sequential, "serial"),
        Variant(sequential, 1),
        Variant(merged, "pairs"),
        Variant(merged, 2),
        Variant(warmed, 2),
        Variant(warmed, default.overlap),
    ]


def _pipelines(options: BenchOptions, default: Variant) -> list[Variant]:
    """Return the best schedules, or the one of ``--schedule``, with Megatron's pattern and with ``--overlap``.

    Orders that are found for the costs are shown beside the best schedules: one of a stage a rank, and the one that the
    options ask for.
    """
    if options.schedule not in (None, AUTO):
        return [Variant(default.program, kind) for kind in ("serial", "pairs", default.overlap)]
    programs = []
    for name, chunks in (("combined_1f1b", 1), ("combined_1f1b", 2), ("zb_v", 2), ("dualpipev", 2)):
        with suppress(ValueError):  # too few microbatches for it
            programs.append(build_schedule(name, ranks=options.pp, microbatches=options.microbatches, chunks=chunks))
    rows = [Variant(program, kind) for program in programs for kind in ("pairs", default.overlap)]
    if options.schedule == AUTO:
        rows.append(Variant(replace(options, chunks=None).program(), default.overlap))
    return rows


FRAMES = 0.956  # share of a shaped link's rate that is left for TCP's payload
CALIBRATIONS = 3  # measurements of compute from which the rate of a balanced wire is found
T = TypeVar("T")
Bounds = dict[str, Callable[[], float]]
Samples = dict[str, tuple[list[float], list[float], list[float]]]
"""Seconds of each row in every round, those in which its exchange was exposed, and the share of it that was hidden."""
Player = Any  # an engine, or another library's schedule with the same ``step`` and ``parameters``, and its ``name``


class Bench:
    """One rank's part of the benchmark of a model on one stage; every time is the slowest rank's.

    ``say`` is called with the name of each measurement as it begins.
    """

    shared_costs = True
    """Whether all programs have the same nodes, so that one measurement of their costs serves them all."""

    def __init__(self, options: BenchOptions, rank: Rank, say: Say) -> None:
        if rank.device.type != "cpu" and (options.wire is not None or options.compute == "timed"):
            option = "--compute timed" if options.wire is None else f"--wire {options.wire}"
            raise ValueError(f"{option} on {rank.device.type}; allowed: on a CPU alone ({devices.VISIBLE}= hides GPUs)")
        if options.memory is not None and options.compute == "timed":
            raise ValueError(
                f"--memory {options.memory} with --compute timed, which computes no tensors; allowed: real"
            )
        self.options, self.rank, self.say = options, rank, say
        self.model, self.played, self.loss_fn, self.block_weights = build(options, rank, options.program())
        corpus = Corpus.load(options.text, sequence=options.sequence)
        batch = corpus.batch(0, rank.data_rank, batch=options.batch, seed=options.seed)
        self.inputs, self.target = fed(options, rank, *batch)
        gbps = None if options.exchange is None else parse_loopback(options.exchange)
        self.loopback_rate = None if gbps is None else 8e9 * gbps
        loops = options.exchange is not None
        self.real = LoopbackExchange(rank.device, gbps) if loops else own_exchange(rank.group)
        self.sender = None if loops else self.real.rank
        self.recording = RecordingExchange(self.real)
        self.parts: Parts = 1 if options.parts == "auto" else options.parts
        self.parts_chosen: str | None = None

    # What differs between kinds of models

    def _alone(self) -> Any:
        """Return a model, on this rank alone, that computes as the measured one does."""
        options = replace(self.options, model=replace(self.options.model, layers=1))
        return MoETransformer(model_config(options), seed=options.seed)

    def _real_modules(self, model: Any) -> Sequence[nn.Module]:
        """Return the modules that compute for real in timed compute, beside the routers of this library."""
        return ()

    def _loss(self, model: Any, x: Tensor, y: Tensor) -> Tensor:
        return loss_fn(model(x), y)

    def _bounds(self, default: Engine) -> Bounds:
        """Return the measurements of a round beside the rows, for an engine whose step is in ``self.recording``.

        Each measurement returns seconds. For one rank without an exchange the bound is a plain loop.
        """
        if self.options.alone:
            return {"plain": self.plain_loop}
        answers = AnsweringExchange(self.real.ranks, self.real.rank, self.recording.counts_received, self._carried)
        plan = default.plan.without_reductions()
        engine = self._engine(plan.program, None, answers, plan=plan)  # an order that was found has its own program
        bounds: Bounds = {"compute_only": lambda: self.step(engine)[0], "exchange_only": self._exchange_only}
        contended = partial(self._replay.beside, bounds["compute_only"])
        return bounds | {"contended": lambda: timed(contended, self.rank)[0]}

    def _reference(self) -> tuple[dict[nn.Parameter, Tensor], float]:
        """Return the reference gradients (none: the first row's) and the factor that scales an engine's to them."""
        return {}, 1.0

    def _peers(self) -> list[Player]:
        return []

    def _further(self, rows: list[dict[str, Any]], bounds: dict[str, float]) -> dict[str, Any]:
        """Return the part of the JSON that compares the rows with other libraries' schedules."""
        return {"best_over_peers": None}

    # Common to all kinds of models

    def run(self) -> dict[str, Any]:
        """Measure everything and return the measured part of the JSON."""
        self.variants = variants_of(self.options)
        with self.ready(list(self.variants.values())) as (engines, rate):
            self.default = next(engines[key] for key, variant in self.variants.items() if variant.default)
            self.players: dict[str, Player] = {**engines, **{peer.name: peer for peer in self._peers()}}
            self._record(self.default)
            bounds, samples, share = self._rounds()
        self.say("all rounds done, comparing gradients")
        checked = self._check()
        rows = [row | checked[key] for key, row in self._rows(samples, bounds).items()]
        return self._summary(rows, bounds, rate, share) | self._further(rows, bounds)

    @contextmanager
    def ready(self, variants: Sequence[Variant]) -> Iterator[tuple[dict[str, Engine], float | None]]:
        """Yield engines with measured costs by the variants' keys, and the wire's rate in bits per second."""
        with self._computing():
            default = next(variant for variant in variants if variant.default)
            rate = self._shape_wire(self.engine(default))
            if self.options.parts == "auto":
                self.say(f"choosing the number of parts, then {counted(self.options.rounds, 'round')}")
                self.parts = "auto"
                engine = self.engine(default)
                self._calibrated(engine)
                self.parts_chosen, self.parts = engine.tuner.parts_choice, engine.tuner.parts
            costs: dict[Program | None, NodeCosts] = {}
            engines = {}
            for number, variant in enumerate(variants, 1):
                self.say(f"measuring nodes, row {number} of {len(variants)}, {variant.key}")
                # An engine that finds an order tries it beside others; with costs that are given it would not.
                of = None if self.shared_costs and not variant.program.search_seconds else variant.program
                engine = engines[variant.key] = self.engine(variant, costs.get(of))
                costs[of] = self._calibrated(engine)
            yield engines, rate

    def engine(self, variant: Variant, costs: NodeCosts | None = None, recompute: Recompute | None = None) -> Engine:
        """Return an engine that plays the variant over the recording exchange."""
        return self._engine(
            variant.program,
            self.rank.mesh,
            self.recording,
            overlap=variant.overlap,
            recompute=recompute or self.options.recompute,
            costs=costs,
            tries=self.options.tries if variant.program.search_seconds else 0,  # other rows play what is predicted
            reduce=self.options.reduce,
        )

    def _engine(self, program: Program, mesh: DeviceMesh | None, exchange: Exchange | None, **fields: Any) -> Engine:
        options = self.options.engine_options(parts=self.parts, block_weights=self.block_weights, **fields)
        return Engine(self.played, program, mesh=mesh, loss_fn=self.loss_fn, options=options, exchange=exchange)

    def step(self, player: Player) -> tuple[float, Any]:
        """Play one step that all ranks start together; return the slowest rank's seconds and the step's result."""
        clear(player.parameters())
        self.recording.clear()
        return timed(lambda: player.step(self.inputs, target=self.target), self.rank)

    def plain_loop(self) -> float:
        """Return the seconds of a loop of forward and backward over the model, without an engine."""
        clear(self.model.parameters())
        count = self.options.microbatches
        set_auxiliary_scale(self.model, 1 / count)
        start = time.perf_counter()
        for x, y in zip(self.inputs.chunk(count), self.target.chunk(count), strict=True):
            (self._loss(self.model, x, y) / count).backward()
        devices.settle(self.rank.device)
        return time.perf_counter() - start

    def _computing(self) -> AbstractContextManager[None]:
        """Return the context in which products wait for their measured time; none for real ones."""
        if self.options.compute == "real":
            return nullcontext()
        self.say(f"measuring compute, then {counted(self.options.rounds, 'round')}")
        x, y = (tensor.chunk(self.options.microbatches)[0] for tensor in (self.inputs, self.target))

        def speed() -> float:
            model = self._alone()
            return operations_per_second(model, lambda: self._loss(model, x, y), self._real_modules(model))

        return TimedCompute(least_in_turn(speed, self.rank)).entered(self.model, self._real_modules(self.model))

    def _calibrated(self, engine: Engine) -> NodeCosts:
        while engine.tuner.settling:
            self.step(engine)
        assert engine.costs is not None
        return engine.costs

    def _record(self, default: Engine) -> None:
        self.recording.keeps = True
        self.step(default)
        self._carried = self.recording.carried()
        nodes = [node for node in default.plan.ranks[default.mesh.rank("pp")] if node.op in (Op.DISPATCH, Op.COMBINE)]
        self._replay = Replay(self.real, [self.recording.sizes[node.tag] for node in nodes], self.rank.device)

    def _sent(self) -> list[int]:
        """Return the bytes that this rank sends in each exchange of a step."""
        return [size.sent_bytes(self.sender) for size in self._replay.sizes]

    def _shape_wire(self, default: Engine) -> float | None:
        """Shape this rank's end of the wire and return its rate in bits per second."""
        if self.options.wire is None:
            return None
        rate = parse_wire(self.options.wire)
        if isinstance(rate, Balanced):
            rounds = counted(self.options.rounds, "round")
            self.say(f"finding the rate at which exchange equals compute, then {rounds}")
            self._calibrated(default)
            self._record(default)
            compute_only = self._bounds(default)["compute_only"]
            seconds = median(compute_only() for _ in range(CALIBRATIONS))
            rate = 8 * slowest(sum(self._sent()), self.rank) / seconds / FRAMES * rate.factor
        barrier(self.rank)
        shape(rate)
        barrier(self.rank)
        return rate

    def _exchange_only(self) -> float:
        barrier(self.rank)
        travels = self.real.ranks > 1 or self.options.exchange is not None
        return slowest(self._replay.run() if travels else 0.0, self.rank)

    def _rounds(self) -> tuple[dict[str, float], Samples, float]:
        """Measure bounds and rows in turn; return their seconds, and the share of the processors that rows use."""
        phases = self._bounds(self.default)
        bounds: dict[str, list[float]] = {name: [] for name in phases}
        samples: Samples = {key: ([], [], []) for key in self.players}
        busy = lasted = 0.0
        rounds = counted(self.options.rounds, "round")
        for turn in range(self.options.rounds + 1):  # the first is for warming up
            what = f"round {turn} of {self.options.rounds}" if turn else f"warming up for {rounds}"
            self.say(what)
            for name, measure in phases.items():
                bounds[name].append(measure())
            busy, lasted = busy - time.process_time(), lasted - time.perf_counter()
            for number, (key, player) in enumerate(self.players.items(), 1):
                self.say(f"{what}, row {number} of {len(self.players)}, {key}")
                seconds, result = self.step(player)
                if not turn:
                    continue
                took, exposed, hidden = samples[key]
                took.append(seconds)
                if isinstance(result, StepResult):
                    exposed.append(slowest(result.overlap.exposed, self.rank))
                    if slowest(result.overlap.exchange, self.rank):
                        least = result.overlap.hidden_fraction if result.overlap.exchange else 1.0
                        hidden.append(-slowest(-least, self.rank))
            busy, lasted = busy + time.process_time(), lasted + time.perf_counter()
        local = int(os.environ.get("LOCAL_WORLD_SIZE", self.rank.size))
        share = slowest(busy / lasted, self.rank) * local / cores()
        found = {name: median(values[1:]) for name, values in bounds.items()}
        if "plain" in found:  # nothing is exchanged
            found |= dict.fromkeys(("compute_only", "contended"), found["plain"]) | {"exchange_only": 0.0}
        found["bound"] = max(found["compute_only"], found["exchange_only"])
        return found, samples, share

    def _check(self) -> dict[str, dict[str, Any]]:
        """Compare every row's gradients with the reference, by real compute, and measure its memory.

        With recomputation, the first reference is a row without it, and the memory of that row is measured too.
        """
        reference, factor = self._reference()
        found: dict[str, dict[str, Any]] = {}
        for key, player in self.players.items():
            without = {}
            if self.options.recompute != "none" and isinstance(player, Engine):
                plain = self.engine(self.variants[key], player.costs, "none")
                without["peak_without_recompute_bytes"] = self._peak(plain)
                reference = reference or taken(plain.parameters())
            memory = self._peak(player)
            grads = taken(player.parameters(), factor if isinstance(player, Engine) else 1.0)
            reference = reference or grads
            equal, difference = compare(list(grads.values()), [reference[parameter] for parameter in grads])
            difference = slowest(difference, self.rank)
            found[key] = {
                "grads_equal": not slowest(float(not equal), self.rank),
                "max_grad_diff": difference if math.isfinite(difference) else None,  # JSON knows no infinity
                "peak_activation_bytes": memory,
            } | without
        return found

    def _peak(self, player: Player) -> int:
        clear(player.parameters())
        return int(slowest(peak_bytes(self.rank.device, lambda: self.step(player)), self.rank))

    def _rows(self, samples: Samples, bounds: Mapping[str, float]) -> dict[str, dict[str, Any]]:
        """Return the figures of each player, by its key."""
        tokens = self.options.batch * self.options.sequence * self.rank.data_ranks
        steps = {key: median(samples[key][0]) for key in self.players}
        first, rows = next(iter(steps.values())), {}
        for key, player in self.players.items():
            engine = self.default
            if isinstance(player, Engine):
                assert player.costs is not None
                engine, simulated = player, simulate(player.plan, player.costs)
                row: dict[str, Any] = {"program": self.variants[key].name, "overlap": str(player.plan.overlap)}
                row |= {"default": self.variants[key].default, "order": player.plan.order}
                row |= {"tried": [str(one) for one in player.tuner.tried], "predicted_ms": 1e3 * simulated.makespan}
                row["predicted_peak_bytes"] = max(map(round, simulated.plan.peak_bytes), default=None)
            else:
                row = {"program": key, "overlap": player.overlap, "default": False, "order": "", "tried": []}
                row |= {"predicted_ms": None, "predicted_peak_bytes": None}
            seconds, exposed, hidden = samples[key]
            row["step_ms"] = {of.__name__: 1e3 * of(seconds) for of in (min, median, max)}
            row["exposed_ms"] = 1e3 * median(exposed) if exposed else None
            row["hidden_fraction"] = median(hidden) if hidden else None
            row |= {"tokens_per_s": tokens / steps[key], "speedup": first / steps[key]}
            row |= {f"over_{name}": steps[key] / bound for name, bound in self._floors(engine, bounds)}
            rows[key] = row
        return rows

    def _floors(self, engine: Engine, bounds: Mapping[str, float]) -> Iterable[tuple[str, float]]:
        """Yield what the steps of an engine are compared with, by name, in seconds."""
        yield from ((name, bounds[name]) for name in ("bound", "contended") if name in bounds)
        plan, costs = engine.plan, engine.costs
        assert costs is not None
        yield "any_order", pipeline_bound(plan.program.placement, plan.program.microbatches, plan.shapes, costs)

    def _summary(
        self, rows: list[dict[str, Any]], bounds: Mapping[str, float], shaped: float | None, share: float
    ) -> dict[str, Any]:
        rate, frames = shaped or self.loopback_rate, FRAMES if self.options.exchange is None else 1.0
        link = "loopback" if self.rank.device.type == "cpu" or self.rank.size == 1 else "nccl"
        sent, largest = (slowest(of([0, *self._sent()]), self.rank) for of in (sum, max))
        ms = {name: 1e3 * seconds for name, seconds in bounds.items()}
        return {
            "wire": {
                "kind": "host" if self.options.exchange else link if rate is None else "shaped",
                "rate_gbps": None if rate is None else rate / 1e9,
                "bytes_sent": int(sent),
                "largest_exchange_bytes": int(largest),
                "bytes_over_rate_ms": None if rate is None else 8e3 * sent / rate / frames,
            },
            "compute": self.options.compute,
            "parts_chosen": self.parts_chosen,
            "processor_share": share,
            "plain_ms": ms.get("plain"),
            "compute_only_ms": ms["compute_only"],
            "exchange_only_ms": ms["exchange_only"],
            "bound_ms": ms["bound"],
            "contended_ms": ms.get("contended"),
            "rows": rows,
        }


def barrier(rank: Rank) -> None:
    if rank.size > 1:
        dist.barrier()


def timed(function: Callable[[], T], rank: Rank) -> tuple[float, T]:
    """Call a function that all ranks start together; return the slowest rank's seconds and this rank's result."""
    barrier(rank)
    start = time.perf_counter()
    result = function()
    devices.settle(rank.device)
    return slowest(time.perf_counter() - start, rank), result


def least_in_turn(measure: Callable[[], float], rank: Rank) -> float:
    """Return the least of the ranks' values; ranks measure one after another."""
    found = 0.0
    for turn in range(rank.size):
        barrier(rank)
        if turn == rank.rank:
            found = measure()
    return -slowest(-found, rank)


def slowest(value: float, rank: Rank) -> float:
    """Return the largest of the ranks' values."""
    if rank.size == 1:
        return value
    largest = torch.tensor(value, dtype=torch.float64, device=rank.device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def compare(grads: Sequence[Tensor], reference: Sequence[Tensor]) -> tuple[bool, float]:
    """Return whether all gradients are equal by ``torch.equal``, and the largest absolute difference.

    A NaN equals nothing, not even another NaN: rows that all diverged have not been shown to agree. A difference that
    is not finite counts as infinity.
    """
    pairs = list(zip(grads, reference, strict=True))
    if all(torch.equal(a, b) for a, b in pairs):
        return True, 0.0
    largest = torch.stack([(a - b).abs().max().double() for a, b in pairs if a.numel()]).max().item()  # keeps a NaN
    return False, largest if math.isfinite(largest) else math.inf


def clear(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.zero_()


def taken(parameters: Iterable[nn.Parameter], factor: float = 1.0) -> dict[nn.Parameter, Tensor]:
    """Return the gradients times a factor, and remove them from the parameters."""
    found = {}
    for parameter in parameters:
        grad, parameter.grad = parameter.grad, None
        found[parameter] = torch.zeros_like(parameter) if grad is None else grad * factor
    return found
