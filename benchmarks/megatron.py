"""Megatron-Core's own MoE layers: its own schedule, and ours on the same chunk, over a shaped wire.

    python benchmarks/megatron.py                                  # 2 ranks, balanced wire, timed compute; needs root
    python benchmarks/megatron.py --rounds 5 --json benchmarks/results/megatron-timed.json
    python benchmarks/megatron.py --layers 2 --hidden 64 --sequence 64 --rounds 1      # that it runs at all

Rows, one after the other in every round:

1. Megatron-Core's ``forward_backward_no_pipelining``: nothing overlaps. Gloo's all-to-all sends in both directions one
   after the other, which takes twice as long as both at once.
2. The same, whose all-to-alls are our exchange, in both directions at once: what overlap alone has to beat.
3. ``integrations.megatron.get_forward_backward_func`` in its place, on the same chunk; with ``dispatcher="rows"``, in
   one part and in two; and with the layers' own dispatchers.
4. Our own ``MoETransformer`` with ``GroupedExperts``, of the same sizes and weights.

Both models have the same weights, read the same text and choose the same experts, so they exchange the same rows.
Matrix products wait for the time of their operations and leave the processor free (``running/bench/compute.py``). After
the rounds every row plays a step with real compute: gradients of the same model must be equal bit by bit, those of
both models agree up to rounding. Needs megatron-core 0.16, Linux, root and iproute2; docs/results.md has the figures.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.pop(0)  # this folder: the package megatron has this file's name
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from rich.console import Console
from torch import Tensor, nn

from overlap1f1b.cut.replacement import replaced
from overlap1f1b.engine import Engine, EngineOptions, StepResult
from overlap1f1b.integrations.megatron import ForwardBackward, get_forward_backward_func
from overlap1f1b.integrations.megatron.forward_backward import COMBINED_NO_PIPELINING
from overlap1f1b.integrations.megatron.layers import dispatchers_of, exchanging
from overlap1f1b.plan import Op, Overlap, Resource
from overlap1f1b.plan.intervals import Intervals, intersection, length, union
from overlap1f1b.running.bench.command import doubts
from overlap1f1b.running.bench.compute import TimedCompute, operations_per_second
from overlap1f1b.running.bench.measure import (
    CALIBRATIONS,
    FRAMES,
    Samples,
    clear,
    compare,
    least_in_turn,
    slowest,
    timed,
)
from overlap1f1b.running.exchanges import AnsweringExchange, RecordingExchange, Replay
from overlap1f1b.running.launch import STORE, cores, end_with, run_ranks
from overlap1f1b.running.ranks import Rank, joined
from overlap1f1b.running.text import Corpus
from overlap1f1b.running.transformer import EPSILON, MoEConfig, MoETransformer
from overlap1f1b.running.wire import Balanced, Wire, parse_wire, shape
from overlap1f1b.running.workload import environment, loss_fn
from overlap1f1b.schedule import build_schedule
from overlap1f1b.simulation import Timeline, simulate
from overlap1f1b.terminal.output import check_files, number, plain_table, print_lines, write_json
from overlap1f1b.transport.exchange import own_exchange
from tests.integrations.megatron.core import models, shim

RANKS = 2
OVERLAPS: tuple[Overlap, ...] = ("serial", "pairs", 3)
MEASURING = 2  # steps that measure nodes, after the first of a drop-in, which finds the exchanges
Grads = dict[str, Tensor]


# ------------------------------------------------------------------------------------------------------------- models


class FusedAttention(nn.Module):
    """Causal attention in one operator, in the place of TransformerEngine's: Megatron-Core's own computes every step
    of it apart, on the processor that the transport needs."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the context ``[S, B, N·D]`` of ``[S, B, N, D]``."""
        q, k, v = (rearrange(x, "S B N D -> B N S D") for x in (query, key, value))
        return rearrange(F.scaled_dot_product_attention(q, k, v, is_causal=True), "B N S D -> S B (N D)")


RECOMPUTES: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}


def chunk_of(config: MoEConfig, recompute: str) -> nn.Module:
    """Return Megatron-Core's GPT model of these sizes."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    own = models.config_of(
        layers=config.layers, ep=RANKS, hidden_size=config.hidden, num_attention_heads=config.heads,
        num_moe_experts=config.experts, moe_router_topk=config.top_k, moe_ffn_hidden_size=config.intermediate,
        ffn_hidden_size=config.intermediate, normalization="RMSNorm", layernorm_epsilon=EPSILON,
        **RECOMPUTES[recompute],
    )  # fmt: skip
    spec = get_gpt_decoder_block_spec(own, use_transformer_engine=False)
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = FusedAttention
    return GPTModel(
        config=own, transformer_layer_spec=spec, vocab_size=config.vocabulary, max_sequence_length=config.sequence,
        share_embeddings_and_output_weights=False, position_embedding_type="rope",
    )  # fmt: skip


def in_both_directions(chunk: nn.Module, play: Callable[[], None]) -> None:
    """Play a step in which Megatron-Core's dispatchers send by our exchange, without an engine."""
    with replaced(exchanging(dispatchers_of(chunk))):
        play()


class Waits:
    """The times in which Megatron-Core's dispatchers gather counts: there they wait for the other ranks."""

    def __init__(self) -> None:
        from megatron.core.transformer.moe import token_dispatcher

        self.intervals: Intervals = []
        self._gather = token_dispatcher.gather_from_sequence_parallel_region
        token_dispatcher.gather_from_sequence_parallel_region = self._timed

    def _timed(self, *args: Any, **kwargs: Any) -> Tensor:
        start = time.perf_counter()
        gathered: Tensor = self._gather(*args, **kwargs)
        self.intervals.append((start, time.perf_counter()))
        return gathered

    def hidden_fraction(self, timeline: Timeline, begun: float) -> float:
        """Return the share of a step's exchange with compute beside it, where gathering counts is not compute."""
        in_flight = timeline.busy(Resource.EXCHANGE, Resource.CONTROL)
        gathering = union((start - begun, end - begun) for start, end in self.intervals)
        beside = intersection(intersection(in_flight, timeline.busy(Resource.COMPUTE)), gathering)
        return timeline.hidden_fraction - length(beside) / timeline.exchange


def by_megatron_names(model: MoETransformer, of: Callable[[nn.Parameter], Tensor]) -> Grads:
    """Return a tensor of each parameter of our model (itself, its gradient), laid out and named as in Megatron-Core."""
    found = {"embedding.word_embeddings.weight": of(model.embedding.weight)}
    heads = model.config.heads
    for layer in range(model.config.layers):
        block, name = model[layer + 1], f"decoder.layers.{layer}"
        qkv = rearrange(of(block.attention.qkv.weight), "(P N D) H -> (N P D) H", P=3, N=heads)
        found |= {
            f"{name}.input_layernorm.weight": of(block.attention_norm.weight),
            f"{name}.self_attention.linear_qkv.weight": qkv,
            f"{name}.self_attention.linear_proj.weight": of(block.attention.out.weight),
            f"{name}.pre_mlp_layernorm.weight": of(block.mlp_norm.weight),
            f"{name}.mlp.router.weight": of(block.mlp.router.gate.weight),
        }
        experts = block.mlp.experts
        for expert, (up, down) in enumerate(zip(of(experts.gate_up), of(experts.down), strict=True)):
            found[f"{name}.mlp.experts.local_experts.{expert}.linear_fc1.weight"] = up
            found[f"{name}.mlp.experts.local_experts.{expert}.linear_fc2.weight"] = down
    return found | {
        "decoder.final_layernorm.weight": of(model.head.norm.weight),
        "output_layer.weight": of(model.head.out.weight),
    }


# --------------------------------------------------------------------------------------------------------------- rows


@dataclass
class Row:
    """A schedule on a model; ``function`` plays a step, and returns its result if an engine has played it."""

    name: str
    overlap: str
    model: nn.Module
    function: Callable[[], StepResult | None]
    engine: Engine | None = None

    @property
    def key(self) -> str:
        return f"{self.name} · {self.overlap}"


class MegatronBench:
    """One rank's part of the benchmark; every time is the slowest rank's."""

    def __init__(self, options: argparse.Namespace, rank: Rank, report: Callable[[str], None]) -> None:
        self.options, self.rank, self.report = options, rank, report
        self.config = MoEConfig(
            layers=options.layers, hidden=options.hidden, heads=options.heads, experts=options.experts,
            top_k=options.top_k, intermediate=options.intermediate, sequence=options.sequence, aux_coefficient=0.0,
        )  # fmt: skip
        # 1. Both models with the same weights, and their data.
        self.model = MoETransformer(self.config, group=rank.group, seed=options.seed)
        self.chunk = chunk_of(self.config, options.recompute)
        given = by_megatron_names(self.model, lambda parameter: parameter.detach())
        with torch.no_grad():
            for name, parameter in self.chunk.named_parameters():
                parameter.copy_(given[name])
        corpus = Corpus.load([], sequence=options.sequence)
        self.inputs, self.target = corpus.batch(
            0, rank.data_rank, batch=options.batch, sequence=options.sequence, seed=options.seed
        )
        # 2. One exchange for all engines.
        assert rank.group is not None
        self.real = own_exchange(rank.group)
        self.recording = RecordingExchange(self.real)
        # 3. The rows.
        self.counts = Waits()
        from megatron.core.pipeline_parallel import get_forward_backward_func as own_func

        self.own = self._row("Megatron-Core", "none", own_func())
        self.duplex = self._row("Megatron-Core, both directions", "none", own_func())
        self.duplex.function = partial(in_both_directions, self.chunk, self.duplex.function)
        self.drop_ins = [self._drop_in(overlap) for overlap in OVERLAPS]
        program = build_schedule("combined_1f1b", microbatches=options.microbatches)
        engine = Engine(
            self.model,
            program,
            mesh=rank.mesh,
            loss_fn=loss_fn,
            exchange=self.recording,
            options=EngineOptions(
                overlap=OVERLAPS[-1],
                reduce=False,
                timeout=options.timeout,
                tries=0,
                verify=False,
                recompute={"full": "block", "moe": "experts"}.get(options.recompute, "none"),
            ),
        )
        play = partial(engine.step, self.inputs, target=self.target)
        self.ours = Row("our layers", str(OVERLAPS[-1]), self.model, play, engine)
        self.by_rows = [self._drop_in(OVERLAPS[-1], parts=parts) for parts in (1, 2)]
        self.rows = [self.own, self.duplex, *self.by_rows, *self.drop_ins, self.ours]

    def _row(self, name: str, overlap: str, function: Callable[..., Any]) -> Row:
        """Return a row on Megatron-Core's model."""
        options, count = self.options, self.options.microbatches
        mask = torch.ones(options.sequence, options.sequence).tril().logical_not()[None, None]
        places = torch.arange(options.sequence).expand(options.batch // count, options.sequence).contiguous()

        def forward_step(data: Iterator[tuple[Tensor, Tensor]], model: nn.Module) -> Any:
            tokens, labels = next(data)
            return model(tokens, places, mask), partial(mean_loss, labels)

        def mean_loss(labels: Tensor, logits: Tensor) -> Any:
            loss = loss_fn(logits, labels)
            return loss, {"loss": loss.detach()}

        def play() -> None:
            data = zip(self.inputs.chunk(count), self.target.chunk(count), strict=True)
            function(
                forward_step_func=forward_step, data_iterator=data, model=self.chunk, num_microbatches=count,
                seq_length=options.sequence, micro_batch_size=options.batch // count, forward_only=False,
            )  # fmt: skip

        return Row(name, overlap, self.chunk, play)

    def _drop_in(self, overlap: Overlap, exchange: Any = None, parts: int = 0) -> Row:
        """Return a row of our function on Megatron-Core's model; its engine is known after the first step.

        With ``parts`` our exchange is in the place of the layers' dispatchers.
        """
        function = get_forward_backward_func(
            schedule=COMBINED_NO_PIPELINING,
            options=EngineOptions(overlap=overlap, timeout=self.options.timeout, parts=parts or 1),
            dispatcher="rows" if parts else "own",
        )
        function._exchange = self.recording if exchange is None else exchange
        name = "drop-in" + (", one row a token" if parts else "") + (f", {parts} parts" if parts > 1 else "")
        row = self._row(name, str(overlap), function)
        play = row.function

        def with_result() -> StepResult | None:
            play()
            row.engine = row.engine or _watched(function)
            return getattr(row.engine, "last", None)

        row.function = with_result
        return row

    # -------------------------------------------------------------------------------------------------- measurements

    def run(self) -> dict[str, Any]:
        """Measure everything and return the measured part of the JSON."""
        self.report("measuring compute")
        timed = TimedCompute(self._speed())
        routers = [m for m in self.chunk.modules() if type(m).__name__ == "TopKRouter"]
        with timed.entered(self.model, routers):
            rate = self._shape_wire()
            self._measure_nodes()
            bounds, samples, share = self._rounds(timed)
        self.report("comparing gradients")
        checked = self._check()
        products = 1e3 * self.operations[self.own.key] / timed.speed
        return self._summary(bounds, samples, share, rate, checked) | {
            "operations": self.operations,
            "products_ms": products,
        }

    def step(self, row: Row) -> tuple[float, StepResult | None]:
        """Play one step that all ranks start together; return the slowest rank's seconds and the step's result."""
        clear(row.model.parameters())
        self.recording.clear()
        return timed(row.function, self.rank)

    def _speed(self) -> float:
        """Return the operations per second of the slowest rank's compute."""
        model = MoETransformer(replace(self.config, layers=1), seed=self.options.seed)
        x, y = (tokens.chunk(self.options.microbatches)[0] for tokens in (self.inputs, self.target))
        return least_in_turn(lambda: operations_per_second(model, lambda: loss_fn(model(x), y)), self.rank)

    def _measure_nodes(self) -> None:
        """Give all engines costs: the drop-ins play the same nodes, so one of them measures for all."""
        *others, first = self.drop_ins
        for row in (first, self.ours, *self.by_rows):
            self.report(f"measuring nodes of {row.key}")
            for _ in range(MEASURING + (row in self.by_rows)):
                self.step(row)
        assert first.engine is not None
        for row in others:
            self.step(row)  # finds the exchanges
        for row in self.drop_ins:  # costs that are set: each row keeps the order that they predict for its overlap
            assert row.engine is not None
            row.engine.costs = first.engine.costs

    def _shape_wire(self) -> float:
        """Shape this rank's end of the wire, by default so that exchange equals compute; return bits per second."""
        rate, row = parse_wire(self.options.wire), self.drop_ins[-1]
        self.step(row)  # finds the exchanges
        if isinstance(rate, Balanced):
            self.report("finding the rate at which exchange equals compute")
            for _ in range(MEASURING + 1):
                self.step(row)
            sent, alone = self._sent(self._sizes(row)), self._alone(row)
            seconds = median(self.step(alone)[0] for _ in range(CALIBRATIONS))
            rate = 8 * sent / seconds / FRAMES * rate.factor
        dist.barrier()
        shape(rate)
        dist.barrier()
        for engine in (row.engine for row in self.rows if row.engine is not None):
            engine.costs = None  # they were measured without a limit
        return rate

    def _sizes(self, row: Row) -> list[Any]:
        """Return the sizes of the exchanges of the last step, in its plan's order."""
        engine = row.engine
        assert engine is not None
        nodes = [node for node in engine.plan.ranks[engine.mesh.rank("pp")] if node.op in (Op.DISPATCH, Op.COMBINE)]
        return [self.recording.sizes[node.tag] for node in nodes]

    def _sent(self, sizes: list[Any]) -> float:
        """Return the bytes that the busiest sender sends in a step."""
        return slowest(float(sum(size.sent_bytes(self.real.rank) for size in sizes)), self.rank)

    def _alone(self, row: Row) -> Row:
        """Return a row that computes in the order of another, whose exchanges are answered at once."""
        engine = row.engine
        assert engine is not None
        self.recording.keeps = True
        self.step(row)
        received, carried = self.recording.counts_received, self.recording.carried()
        answers = AnsweringExchange(self.real.ranks, self.real.rank, received, carried)
        if row is self.ours:
            twin = Engine(
                self.model,
                engine.program,
                loss_fn=loss_fn,
                exchange=answers,
                options=EngineOptions(plan=engine.plan, recompute=engine.options.recompute, verify=False),
            )
            return Row(row.name, "", self.model, lambda: twin.step(self.inputs, target=self.target))
        found = self._drop_in(OVERLAPS[-1], answers)
        self.step(found)  # finds the exchanges
        assert found.engine is not None
        found.engine.plan = engine.plan
        return found

    def _rounds(self, timed: TimedCompute) -> tuple[dict[str, float], dict[str, Samples], float]:
        """Measure bounds and rows in turn; return their seconds, and the share of the processors that rows use."""
        bounds: dict[str, list[float]] = {}
        phases: dict[str, Callable[[], float]] = {}
        for label, row in (("", self.drop_ins[-1]), ("our_layers_", self.ours)):
            self.step(row)
            replay = Replay(self.real, self._sizes(row), self.rank.device)
            if not label:
                self.sizes = self._sizes(row)
            alone = self._alone(row)
            phases[f"{label}compute_only"] = partial(self._computed, alone)
            phases[f"{label}exchange_only"] = partial(self._replayed, replay)
            if not label:
                phases["contended"] = partial(self._beside, alone, replay)
        samples = {row.key: Samples() for row in self.rows}
        self.operations: dict[str, float] = {}
        self.strict: dict[str, list[float]] = {}
        self.gathering: dict[str, list[float]] = {}
        busy = lasted = 0.0
        for turn in range(self.options.rounds + 1):  # the first is for warming up
            self.report(f"round {turn} of {self.options.rounds}" if turn else "warming up")
            for name, measure in phases.items():
                bounds.setdefault(name, []).append(measure())
            for row in self.rows:
                before = timed.operations
                self.counts.intervals.clear()
                busy, lasted = busy - time.process_time(), lasted - time.perf_counter()
                seconds, result = self.step(row)
                busy, lasted = busy + time.process_time(), lasted + time.perf_counter()
                self.operations[row.key] = slowest(timed.operations - before, self.rank)
                if not turn:
                    continue
                samples[row.key].seconds.append(seconds)
                self.gathering.setdefault(row.key, []).append(slowest(length(self.counts.intervals), self.rank))
                if result is not None:
                    samples[row.key].exposed.append(slowest(result.overlap.exposed, self.rank))
                    samples[row.key].hidden.append(-slowest(-result.overlap.hidden_fraction, self.rank))
                    assert row.engine is not None
                    strict = self.counts.hidden_fraction(result.overlap, result.times.begun)
                    self.strict.setdefault(row.key, []).append(-slowest(-strict, self.rank))
        share = slowest(busy / lasted, self.rank) * self.rank.size / cores()
        return {name: median(values[1:]) for name, values in bounds.items()}, samples, share

    def _computed(self, alone: Row) -> float:
        return self.step(alone)[0]

    def _replayed(self, replay: Replay) -> float:
        dist.barrier()
        return slowest(replay.run(), self.rank)

    def _beside(self, alone: Row, replay: Replay) -> float:
        return timed(lambda: replay.beside(lambda: self.step(alone)), self.rank)[0]

    def _check(self) -> dict[str, dict[str, Any]]:
        """Compare every row's gradients with those of Megatron-Core's own schedule, by real compute."""
        found: dict[str, dict[str, Any]] = {}
        reference: Grads = {}
        for row in self.rows:
            took = self.step(row)[0]
            if row is self.ours:
                grads = by_megatron_names(self.model, lambda parameter: parameter.grad.detach())
                # An engine takes the mean over the ranks that hold data, too; Megatron-Core's sum comes later.
                grads = {name: grad * self.rank.data_ranks for name, grad in grads.items()}
            else:
                grads = {name: p.grad.detach().clone() for name, p in self.chunk.named_parameters()}
            reference = reference or grads
            equal, difference = compare([grads[name] for name in reference], list(reference.values()))
            gap = max(
                float((grads[name] - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
                for name, expected in reference.items()
            )
            found[row.key] = {
                "real_step_ms": 1e3 * took,
                "grads_equal": not slowest(float(not equal), self.rank),
                "max_grad_diff": slowest(difference, self.rank),
                "max_relative_grad_diff": slowest(gap, self.rank),
            }
        return found

    def _summary(
        self,
        bounds: dict[str, float],
        samples: dict[str, Samples],
        share: float,
        rate: float,
        checked: dict[str, dict[str, Any]],
    ) -> dict[str, Any]:
        bound = bounds["bound"] = max(bounds["compute_only"], bounds["exchange_only"])
        bounds["our_layers_bound"] = max(bounds["our_layers_compute_only"], bounds["our_layers_exchange_only"])
        rows_bound = max(bounds["compute_only"], bounds["our_layers_exchange_only"])  # the same rows travel
        steps = {key: median(sample.seconds) for key, sample in samples.items()}
        rows = []
        for row in self.rows:
            below = rows_bound if row in self.by_rows else bounds["our_layers_bound"] if row is self.ours else bound
            predicted = None
            if row.engine is not None and row.engine.costs is not None:
                predicted = 1e3 * simulate(row.engine.plan, row.engine.costs).makespan
            rows.append(
                {"program": row.name, "overlap": row.overlap, "order": row.engine.plan.order if row.engine else ""}
                | samples[row.key].summary()
                | {"speedup": steps[self.own.key] / steps[row.key], "over_bound": steps[row.key] / below}
                | {"predicted_ms": predicted}
                | {"hidden_without_counts": median(self.strict[row.key]) if row.key in self.strict else None}
                | {"gathering_counts_ms": 1e3 * median(self.gathering[row.key])}
                | checked[row.key]
            )
        _, duplex, *_, best, ours = rows
        sent = self._sent(self.sizes)
        return {
            "wire": {
                "kind": "shaped",
                "rate_gbps": rate / 1e9,
                "bytes_sent": int(sent),
                "bytes_over_rate_ms": 8e3 * sent / rate / FRAMES,
            },
            "compute": "timed",
            "processor_share": share,
            **{f"{name}_ms": 1e3 * seconds for name, seconds in bounds.items()},
            "rows": rows,
            "speedup_over_megatron": best["speedup"],
            "speedup_over_both_directions": best["speedup"] / duplex["speedup"],
            "hidden_points_from_our_layers": 100 * (best["hidden_fraction"] - ours["hidden_fraction"]),
        }


def _watched(function: ForwardBackward) -> Engine | None:
    """Return the engine of a drop-in, which from now on keeps the result of its last step as ``last``."""
    if not function._engines:
        return None
    (inner,) = function._engines.values()
    engine: Any = inner.engine
    play = engine.play

    def keeping(*args: Any, **kwargs: Any) -> Any:
        played = play(*args, **kwargs)
        engine.last = played.result
        return played

    engine.play = keeping
    found: Engine = engine
    return found


# ------------------------------------------------------------------------------------------------------------ command


def show(result: dict[str, Any], screen: Console) -> None:
    """Print the table, with the bounds above it."""
    wire = result["wire"]
    screen.print(
        f"2 ranks, shaped to {1e3 * wire['rate_gbps']:.0f} Mbit/s, timed compute, "
        f"{wire['bytes_sent'] / 2**20:.1f} MiB sent"
    )
    screen.print(
        f"ms: compute only {result['compute_only_ms']:.0f}, exchange only {result['exchange_only_ms']:.0f} "
        f"(bytes over rate {wire['bytes_over_rate_ms']:.0f}), contended {result['contended_ms']:.0f}, "
        f"products {result['products_ms']:.0f}; "
        f"our layers: compute only {result['our_layers_compute_only_ms']:.0f}, "
        f"exchange only {result['our_layers_exchange_only_ms']:.0f}; processors {result['processor_share']:.0%} busy"
    )
    text = ("schedule", "overlap", "order")
    figures = ("step ms", "min–max", "speed-up", "over bound", "hidden", "exposed ms", "counts ms", "predicted ms")
    table = plain_table((*text, *figures, "gradients"), text, no_wrap=True)
    for row in result["rows"]:
        step = row["step_ms"]
        table.add_row(
            row["program"],
            row["overlap"],
            row["order"],
            f"{step['median']:.0f}",
            f"{step['min']:.0f}–{step['max']:.0f}",
            f"{row['speedup']:.2f}×",
            f"{row['over_bound']:.3f}",
            number(row["hidden_fraction"], ".1%"),
            number(row["exposed_ms"], ".0f"),
            f"{row['gathering_counts_ms']:.0f}",
            number(row["predicted_ms"], ".0f"),
            "equal" if row["grads_equal"] else f"differ by {row['max_relative_grad_diff']:.1e}",
        )
    screen.print(table)
    screen.print(
        f"Megatron-Core's layers: {result['speedup_over_megatron']:.2f}× as fast as by its own schedule, "
        f"{result['speedup_over_both_directions']:.2f}× with both directions at once; hidden "
        f"{result['hidden_points_from_our_layers']:+.1f} points from our layers"
    )
    print_lines(screen, *(f"error of measurement: {doubt}" for doubt in result["doubts"]), style="bold red")


def bench(options: argparse.Namespace, rank: Rank) -> None:
    """Measure every row; the first rank reports."""
    screen = Console(stderr=options.json == "-", quiet=rank.rank != 0, width=160)

    def report(text: str) -> None:
        screen.print(f"{time.strftime('%H:%M:%S')} {text}", style="dim", highlight=False)

    shim.apply()  # before the first import of megatron.core
    with models.init_parallel(ep=RANKS):
        result = MegatronBench(options, rank, report).run()
    if rank.rank:
        return
    import megatron.core

    named = {name: value for name, value in vars(options).items() if name not in ("json", "timeout")}
    versions = environment(rank) | {"megatron_core": megatron.core.__version__}
    result = {"environment": versions, "workload": named} | result
    result["doubts"] = doubts(result)
    show(result, screen)
    write_json(options.json, result)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    for name, default, what in (
        ("layers", 4, "layers"), ("hidden", 256, "hidden size"), ("heads", 4, "attention heads"),
        ("experts", 8, "experts of a layer"), ("top-k", 2, "experts of a token"),
        ("intermediate", 512, "intermediate size of an expert"), ("sequence", 256, "tokens of a sequence"),
        ("batch", 16, "sequences of a rank"), ("microbatches", 8, "microbatches of a step"),
        ("rounds", 3, "measured rounds"), ("seed", 0, "seed of weights and text"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default: {default})")
    parser.add_argument("--recompute", choices=RECOMPUTES, default="none", help="what layers compute again")
    parser.add_argument("--wire", default="balanced", help="as of overlap1f1b bench (default: balanced)")
    parser.add_argument("--timeout", type=float, default=120.0, help="limit of every wait in seconds (default: 120)")
    parser.add_argument("--json", help="file for the results")
    options = parser.parse_args()
    parse_wire(options.wire)
    check_files({"json": options.json})
    if options.batch % options.microbatches:
        parser.error(f"--batch {options.batch}; allowed: a multiple of --microbatches {options.microbatches}")
    if STORE not in os.environ:
        with Wire(RANKS) as wire:
            return run_ranks(sys.argv[1:], RANKS, wire=wire, command=(sys.executable, __file__))

    def run() -> int:
        with joined((1, 1, RANKS), options.timeout) as rank:
            bench(options, rank)
        return 0

    end_with(run)


if __name__ == "__main__":
    sys.exit(main())
