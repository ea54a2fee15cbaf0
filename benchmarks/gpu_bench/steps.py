"""The step of a model, its exchanges through host memory, under several programs and ratios of exchange to compute."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from gpu_bench.context import Context
from gpu_bench.model import Routing, Workload, build, loss_fn
from overlap1f1b import Engine, build_schedule
from overlap1f1b.engine import EngineOptions
from overlap1f1b.plan import NodeCosts, Overlap, Plan
from overlap1f1b.transport.exchange import Exchange, LocalExchange
from overlap1f1b.transport.loopback import LoopbackExchange

ROWS: tuple[tuple[str, int, Overlap], ...] = (
    ("sequential", 0, "serial"),
    ("combined_1f1b", 0, "pairs"),  # Megatron-Core's pattern
    ("combined_1f1b", 1, 2),
    ("combined_1f1b", 1, 3),  # the default
)
CASES: tuple[tuple[int, Routing, float], ...] = (
    (4, "real", 1.0),
    (4, "balanced", 2.0),
    (4, "balanced", 0.5),
    (4, "balanced", 1.0),
    (8, "real", 1.0),
)
"""Layers, routing, exchange : compute."""
TINY: tuple[tuple[int, Routing, float], ...] = ((2, "real", 1.0),)
LAYER_S = 5.0  # a table may take as long for each layer, until one has been measured
DEPTH = 4  # exchanges in flight when they are measured alone


def run(context: Context) -> dict[str, Any]:
    """Every model and ratio for which there is time."""
    found: dict[str, Any] = {"tables": [], "skipped": [], "problems": [], "layer_s": LAYER_S}
    if context.cuda:  # of torch's attentions the one that has a deterministic backward
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
    for layers, routing, ratio in TINY if context.tiny else CASES:
        name = f"{layers} layers, {routing}, {ratio:g}"
        if context.left < layers * found["layer_s"]:
            found["skipped"].append(f"{name}: no time left")
            continue
        try:
            measure(context, found, layers, routing, ratio)
        except Exception as error:  # one that does not fit in memory leaves the others
            found["problems"].append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
            context.keep(found)
        context.free()
    return found


def measure(context: Context, found: dict[str, Any], layers: int, routing: Routing, wanted: float) -> None:
    """One model: what it computes and exchanges, at a ratio, or the least that the loopback can reach."""
    begun = time.monotonic()
    work = build(context, layers, routing=routing)
    serial = Steps(context, work, ROWS[0], LocalExchange())
    full = LoopbackExchange(context.device)
    Steps(
        context, work, ROWS[0], full, plan=serial.engine.plan
    ).step()  # with a plan nothing is measured, or sent again
    sent = full.bytes_sent
    compute = Steps(context, work, ROWS[0], LocalExchange(), plan=serial.engine.plan)
    compute_s = median(compute.step()[0] for _ in range(3))
    full_gbps = full.full_rate((16 if context.tiny else 256) << 20)
    ratio = max(wanted, sent / 1e9 / full_gbps / compute_s)
    exchange = LoopbackExchange(context.device, sent / 1e9 / ratio / compute_s if ratio == wanted else None)
    table = {
        "layers": layers, "routing": routing, "ratio": ratio, "gbps": exchange.gbps or full_gbps,
        "bytes": sent, "workload": work.options,
    } | rows(context, work, exchange, sent)  # fmt: skip
    found["tables"].append(table)
    found["problems"] += [
        f"{layers} layers, {routing}, {ratio:.2f}: gradients of {row['name']} differ"
        for row in table["rows"]
        if not row["grads_equal"]
    ]
    found["layer_s"] = max(found["layer_s"], (time.monotonic() - begun) / layers)
    context.keep(found)


def rows(context: Context, work: Workload, exchange: LoopbackExchange, sent: int) -> dict[str, Any]:
    """Compute only, exchange only and every program, in turns."""
    measuring = Steps(context, work, ROWS[0], exchange)
    while (costs := measuring.engine.costs) is None:
        measuring.step()
    programs = [Steps(context, work, row, exchange, costs=costs) for row in ROWS]
    compute = Steps(context, work, ROWS[-1], LocalExchange(), plan=programs[-1].engine.plan)
    table = [program.checked() for program in programs]
    reference = programs[0].grads
    for row, program in zip(table, programs, strict=True):
        row["grads_equal"] = all(torch.equal(a, b) for a, b in zip(program.grads, reference, strict=True))
        row["predicted_ms"] = 1e3 * program.engine.plan.predicted
    for program in programs:
        program.grads = []
    alone = Alone(context, work, exchange, sent)
    seconds: dict[str, list[float]] = {"compute_only": [], "exchange_only": []}
    for turn in range((1 if context.quick else 3) + 1):  # the first warms up
        took = {"compute_only": compute.step()[0], "exchange_only": alone.run()}
        for name, value in took.items() if turn else ():
            seconds[name].append(value)
        for row, program in zip(table, programs, strict=True):
            second, result = program.step()
            if turn:
                row["samples_ms"].append(1e3 * second)
                row["queued"].append(1e3 * program.queued_s)
                row["clocks"].append(context.clock)
                row["exposed"].append(1e3 * result.overlap.exposed)
                row["hidden"].append(result.overlap.hidden_fraction)
    bounds = {f"{name}_ms": 1e3 * median(values) for name, values in seconds.items()}
    bound = max(bounds.values())
    for row in table:
        samples = row.pop("samples_ms")
        row["step_ms"] = {"min": min(samples), "median": median(samples), "max": max(samples)}
        row["exposed_ms"], row["hidden_fraction"] = median(row.pop("exposed")), median(row.pop("hidden"))
        row["queued_ms"], row["sm_mhz"] = median(row.pop("queued")), median(row.pop("clocks"))
        row["over_bound"] = row["step_ms"]["median"] / bound
        row["speedup"] = table[0]["step_ms"]["median"] / row["step_ms"]["median"]
        row["tokens_per_s"] = 1e3 * work.tokens / row["step_ms"]["median"]
        context.say(
            f"{row['name']}: {row['step_ms']['median']:.1f} ms, over bound {row['over_bound']:.3f}, "
            f"hidden {row['hidden_fraction']:.0%}, gradients {'equal' if row['grads_equal'] else 'DIFFER'}"
        )
    return bounds | {"bound_ms": bound, "rows": table}


class Steps:
    """Steps of a workload by one program."""

    def __init__(
        self,
        context: Context,
        work: Workload,
        row: tuple[str, int, Overlap],
        exchange: Exchange,
        *,
        costs: NodeCosts | None = None,
        plan: Plan | None = None,
        **options: Any,
    ) -> None:
        name, warmup, overlap = row
        program = build_schedule(
            name, microbatches=work.microbatches, extra_warmup=warmup if name == "combined_1f1b" else None
        )
        self.name = f"{program.name} · {overlap}"
        self.context, self.work, self.grads = context, work, list[Tensor]()
        self.queued_s = 0.0  # of the last step: a device that is faster waits for the host
        if plan is not None:
            program = plan.program
        self.engine = Engine(
            work.model,
            program,
            loss_fn=loss_fn,
            exchange=exchange,
            options=EngineOptions(
                overlap=overlap, costs=costs, plan=plan, tries=0, verify=False, timeout=60, **options
            ),
        )

    def step(self) -> tuple[float, Any]:
        """Seconds from the first launch to the last kernel."""
        self.work.model.zero_grad()
        return self.context.seconds(self._queue)

    def _queue(self) -> Any:
        begun = time.perf_counter()
        result = self.engine.step(self.work.inputs, target=self.work.target)
        self.queued_s = time.perf_counter() - begun
        return result

    def checked(self) -> dict[str, Any]:
        """A step whose gradients and memory are looked at."""
        before, retries = 0, 0
        if self.context.cuda:
            self.work.model.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            before, retries = torch.cuda.memory_allocated(), _retries()
        with deterministic():
            self.step()
        self.grads = gradients(self.work.model.parameters())
        memory = {"peak_bytes": 0, "allocator_retries": 0}
        if self.context.cuda:
            memory = {
                "peak_bytes": torch.cuda.max_memory_allocated() - before,
                "allocator_retries": _retries() - retries,
            }
        return {
            "name": self.name,
            "order": self.engine.plan.order,
            "samples_ms": [],
            "exposed": [],
            "hidden": [],
            "queued": [],
            "clocks": [],
        } | memory


class Alone:
    """The exchanges of a step that sends these bytes, one behind the other, nothing else."""

    def __init__(self, context: Context, work: Workload, exchange: LoopbackExchange, sent: int) -> None:
        self.context, self.exchange = context, exchange
        self.count = 4 * work.model.config.layers * work.microbatches  # dispatch and combine, forward and backward
        tokens = work.tokens // work.microbatches
        self.rows = context.randn(tokens, round(sent / self.count / tokens / context.dtype.itemsize))

    def run(self) -> float:
        """Seconds from the first launch to the last byte."""
        return self.context.seconds(self._exchange)[0]

    def _exchange(self) -> None:
        flying: deque[Any] = deque()
        for _ in range(self.count):
            if len(flying) == DEPTH:
                flying.popleft().finish()
            flying.append(self.exchange.rows(self.rows))
        while flying:
            flying.popleft().finish()


def gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Copies, zeros where there is none."""
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]


@contextmanager
def deterministic() -> Iterator[None]:
    """Attention's backward otherwise adds in the order in which blocks happen to end.

    Not with ``warn_only``, under which FlashAttention's backward warns and stays as it was.
    """
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled


def _retries() -> int:
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))
