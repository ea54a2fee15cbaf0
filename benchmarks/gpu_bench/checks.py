"""Whether everything is right on this device, before anything is timed. Each check fails alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpu_bench.context import Context, relative_error
from gpu_bench.kernels import Case, Shape, cases
from gpu_bench.model import Workload, build, loss_fn
from gpu_bench.steps import deterministic, gradients
from overlap1f1b import Engine, EngineOptions, NodeCosts, build_schedule
from overlap1f1b.engine import CapacityOverflowError
from overlap1f1b.kernels.choice import triton_of
from overlap1f1b.kernels.grouped_mm import add_weight_grad_
from overlap1f1b.transport.exchange import Exchange
from overlap1f1b.transport.loopback import LoopbackExchange

SMALL = (
    Shape("aligned", 256, 128, 64, 2, 8),
    Shape("odd", 257, 30, 26, 3, 5),
    Shape("one choice", 100, 514, 130, 1, 40),
)
COSTS = NodeCosts.uniform(attention=3, experts=4, dispatch=5, counts=0.4, dense=1)


def run(context: Context) -> dict[str, Any]:
    """The outcome of each check by its name: "ok", or what is wrong."""
    outcomes: dict[str, str] = {}
    skipped: list[str] = []
    if context.cuda:
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)

    def check(name: str, function: Callable[[], str | None]) -> None:
        if context.left <= 0:
            skipped.append(f"{name}: no time left")
            return
        try:
            outcomes[name] = function() or "ok"
        except Exception as error:
            outcomes[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"
        context.say(f"{name}: {outcomes[name]}")

    for shape in SMALL:
        for case in cases(context, shape):
            check(f"{case.name}, {shape.name}", lambda case=case: kernel(context, case))
    check("loopback", lambda: loopback(context))
    wanted: list[Tensor] = []
    check("gradients of sequential against plain autograd", lambda: against_autograd(context, wanted))
    for overlap in ("pairs", 2, 3):
        check(f"gradients of overlap {overlap}", lambda overlap=overlap: same(context, wanted, overlap=overlap))
    check("gradients under a capacity", lambda: same(context, wanted, overlap=3, capacity=1.0))
    check("an overflow raises", lambda: raises(context))
    problems = [f"{name}: {outcome}" for name, outcome in outcomes.items() if outcome != "ok"]
    return {"outcomes": outcomes, "skipped": skipped, "problems": problems}


def kernel(context: Context, case: Case) -> str | None:
    """Triton's kernel against its twin; on a CPU the twin against itself with other memory."""
    op, args = case.op, case.args
    other = triton_of(op) if context.cuda else op
    mains = [(args[0].clone(), *args[1:]) for _ in range(2)] if op is add_weight_grad_ else [args, args]
    with torch.no_grad():
        wanted, found = case.read(op(*mains[0])), case.read(other(*mains[1]))
    exact = all(torch.equal(f, w) for f, w in zip(found, wanted, strict=True) if not w.is_floating_point())
    error = relative_error(found, wanted)
    limit = 1e-2 if context.dtype == torch.bfloat16 else 1e-5
    return (
        None if exact and error < limit else f"differs by {error:.1e}, whole numbers {'equal' if exact else 'differ'}"
    )


def loopback(context: Context) -> str | None:
    """Bytes of exchanges of many sizes, four in flight, fast and slowed down."""
    for gbps in (None, 1.0):
        exchange = LoopbackExchange(context.device, gbps, check=True)
        sizes = (0, 1, 7, 1000, 3001, 70_000)  # the last in several chunks
        sources = [context.randn(rows, 129, seed=rows) for rows in sizes]
        flying = [exchange.rows(source) for source in sources]
        for source, transfer in zip(sources, flying, strict=True):
            if not torch.equal(transfer.finish(), source):
                return f"{len(source)} rows came back otherwise than they left"
        if wrong := exchange.mismatches():
            return f"{wrong} exchanges have other bytes"
    return None


def _workload(context: Context) -> Workload:
    """The same kernels every time: what each model found the faster for itself could have other bits."""
    return build(context, 2, routing="real", small=True, kernels="triton" if context.cuda else "torch")


def _engine(context: Context, overlap: Any, exchange: Exchange | None = None, **options: Any) -> Engine:
    work = _workload(context)
    name, warmup = ("sequential", {}) if overlap == "serial" else ("combined_1f1b", {"extra_warmup": 1})
    if overlap == "pairs":
        warmup = {"extra_warmup": 0}
    program = build_schedule(name, microbatches=work.microbatches, **warmup)
    engine = Engine(
        work.model,
        program,
        loss_fn=loss_fn,
        exchange=exchange,
        options=EngineOptions(overlap=overlap, costs=COSTS, timeout=60, **options),
    )
    with deterministic():
        engine.step(work.inputs, target=work.target)
    return engine


def against_autograd(context: Context, wanted: list[Tensor]) -> str | None:
    """The engine's own baseline against ``loss.backward()``."""
    work = _workload(context)
    with deterministic():
        work.plain_step()
    plain = gradients(work.model.parameters())
    wanted += gradients(_engine(context, "serial", LoopbackExchange(context.device, check=True)).parameters())
    error = relative_error(wanted, plain)
    return None if error < 1e-2 else f"differ by {error:.1e}"


def same(context: Context, wanted: list[Tensor], **options: Any) -> str | None:
    """Gradients over the loopback, to the bit those of sequential."""
    if not wanted:
        return "nothing to compare with"
    exchange = LoopbackExchange(context.device, check=True)
    found = gradients(_engine(context, options.pop("overlap"), exchange, **options).parameters())
    if wrong := exchange.mismatches():
        return f"{wrong} exchanges have other bytes"
    if all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)):
        return None
    return f"differ by {relative_error(found, wanted):.1e}"


def raises(context: Context) -> str | None:
    """Rows without room are never lost in silence."""
    try:
        _engine(context, 3, LoopbackExchange(context.device), capacity=0.5)
    except CapacityOverflowError:
        return None
    return "half of the rows were lost in silence"
