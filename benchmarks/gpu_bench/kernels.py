"""Each kernel beside its torch twin, eager and compiled, against the bytes that it must move."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpu_bench.context import Context, relative_error, tensors
from overlap1f1b.kernels.choice import triton_of
from overlap1f1b.kernels.combine import pack_grads, spread_grad, sum_rows
from overlap1f1b.kernels.grouped_mm import add_weight_grad_
from overlap1f1b.kernels.permute import Layout, expand_rows, pack_rows, take_rows
from overlap1f1b.kernels.routing import Rule, route_tokens
from overlap1f1b.kernels.slots import place_rows, place_slots
from overlap1f1b.kernels.swiglu import swiglu_rows, swiglu_rows_backward


@dataclass(frozen=True)
class Shape:
    """Tokens, hidden, intermediate, choices a token, experts."""

    name: str
    T: int
    H: int
    I: int  # noqa: E741
    K: int
    E: int


SHAPES = (
    Shape("B", 8192, 2048, 768, 8, 128),
    Shape("A", 4096, 7168, 2048, 8, 256),
    Shape("odd, narrow", 3001, 1000, 504, 3, 60),
    Shape("odd, one choice", 1777, 2050, 1026, 1, 17),
)
TINY = (Shape("tiny", 24, 16, 8, 2, 4), Shape("tiny, odd", 7, 9, 5, 3, 5))


@dataclass(frozen=True)
class Case:
    """A call, the bytes that it must at least move, and its arguments."""

    op: Callable[..., Any]
    bytes: int
    args: tuple[Any, ...]
    label: str = ""
    read: Callable[[Any], list[Tensor]] = tensors
    """What of its result has values."""
    not_compiled: str = ""
    """Why torch.compile has no use for its twin, if so."""

    @property
    def name(self) -> str:
        return self.label or self.op.__name__


def cases(context: Context, s: Shape) -> Iterator[Case]:
    """One after another, so that not all of them hold memory at once; routing is skewed, some experts have no token."""
    R = s.T * s.K
    logits = context.randn(s.T, s.E, dtype=torch.float32, seed=1) - torch.arange(s.E, device=context.device) / s.E
    bias = torch.zeros(s.E, device=context.device)
    rule = Rule(s.K, normalize=True)
    indices, weights, _ = route_tokens(logits, bias, rule)
    tokens = context.randn(s.T, s.H, seed=2)
    layout = Layout.of(tokens, weights)
    width, carried = context.dtype.itemsize * s.H, context.dtype.itemsize * layout.width
    ranks = next(ranks for ranks in (8, 5, 3, 1) if s.E % ranks == 0)
    order, spots, _, counts = place_rows(indices, s.E, ranks)
    sent = int(counts[:, 0].sum())
    yield Case(place_rows, (3 * R + sent) * 8, (indices, s.E, ranks))
    args = (tokens, indices, weights, order, spots, s.E // ranks, layout)
    yield Case(pack_rows, sent * (width + carried), args, f"pack for {ranks}", lambda rows: list(layout.opened(rows)))
    packed = pack_rows(tokens, indices, weights, None, None, s.E, layout)
    slots = place_slots(layout.opened(packed)[2][:, : s.K], s.E, R)
    order, inverse, ends = slots
    yield Case(place_slots, R * 18, (layout.opened(packed)[2][:, : s.K], s.E, R))
    yield Case(route_tokens, 2 * s.T * s.E * 4 + s.T * s.K * 12, (logits, bias, rule))
    yield Case(expand_rows, s.T * carried + R * width, (packed, order, inverse, layout, False), "expand")
    del packed
    rows, factors = context.randn(R, s.H, seed=3), context.randn(R, seed=7)
    yield Case(sum_rows, (1 + s.K) * s.T * width, (rows, inverse, s.K, factors, False), "weigh")
    yield Case(spread_grad, (1 + 2 * s.K) * s.T * width, (tokens, rows, order, inverse, factors), "weigh.grad")
    grads = s.T * carried + R * width

    def read(packed: Tensor) -> list[Tensor]:
        return list(layout.opened(packed)[:2])

    yield Case(pack_grads, grads, (rows, factors.to(weights.dtype), inverse, layout, False), "expand.grad", read)
    yield Case(take_rows, 2 * R * width, (rows, order), "take")
    del tokens
    size = context.dtype.itemsize
    gate_up, p = context.randn(R, 2 * s.I, seed=4), context.randn(R, dtype=torch.float32, seed=5)
    yield Case(swiglu_rows, 3 * R * s.I * size, (gate_up, p), "swiglu·p")
    grad = context.randn(R, s.I, seed=6)
    yield Case(swiglu_rows_backward, 5 * R * s.I * size, (grad, gate_up, p), "swiglu·p.grad")
    del gate_up
    main = torch.zeros(s.E, s.I, s.H, dtype=torch.float32, device=context.device)
    args = (main, grad, rows, ends)
    loops = "" if context.cuda and s.H % 8 == s.I % 8 == 0 else "loops over experts on the host"
    yield Case(add_weight_grad_, 8 * main.numel(), args, "weight.grad", not_compiled=loops)


def run(context: Context) -> dict[str, Any]:
    """All shapes, then torch.compile of the twins while there is time; what fails or is left out is said in its row."""
    copy = context.results.get("ceilings", {}).get("copy_gb_s")
    found: dict[str, Any] = {"copy_gb_s": copy, "rows": [], "problems": []}
    shapes = TINY if context.tiny else SHAPES
    for shape in shapes:
        for case in cases(context, shape):
            row = measured(context, shape, case, copy) if context.left > 0 else described(shape, case)
            found["rows"].append(row)
            if row.get("problem"):
                found["problems"].append(f"{case.name} at {shape.name}: {row['problem']}")
            context.say(f"{shape.name} {case.name}: {_text(row)}")
            context.free()
    of = iter(found["rows"])
    longest = 15.0  # what the next compilation may take; the first starts the compiler
    for shape in shapes:
        for case in cases(context, shape):
            row = next(of)
            row |= compiled(context, case) if context.left > longest else {"not_compiled": "no time left"}
            if "compiled_after_s" in row:
                longest = max(8.0, 1.5 * row["compiled_after_s"])
            context.say(f"compiled {shape.name} {case.name}: {row.get('compiled_ms', row.get('not_compiled'))}")
            context.free()
    out = [
        f"{row['kernel']} at {row['shape']['name']} ({why})"
        for row in found["rows"]
        if (why := row.get("not_compiled"))
    ]
    late = [row for row in found["rows"] if "eager_ms" not in row and "problem" not in row]
    found["skipped"] = [f"{row['kernel']} at {row['shape']['name']}: no time left" for row in late]
    found["skipped"] += [f"torch.compile of {name}" for name in out]
    return found


def compiled(context: Context, case: Case) -> dict[str, Any]:
    """The time of the twin under torch.compile, and the seconds until it ran; on a CPU traced only."""
    if case.not_compiled:
        return {"not_compiled": case.not_compiled}
    torch.compiler.reset()  # each shape by itself, none by code for any shape
    backend = "inductor" if context.cuda else "eager"
    started = time.monotonic()
    try:
        with torch.no_grad():
            twin = torch.compile(case.op, dynamic=False, backend=backend)
            twin(*case.args)
            context.synchronize()
            after = time.monotonic() - started
            milliseconds = context.milliseconds(lambda: twin(*case.args), seconds=0.2)
    except Exception as error:
        after = time.monotonic() - started
        return {"not_compiled": f"{type(error).__name__}: {str(error)[:200]}", "compiled_after_s": after}
    return {"compiled_ms": milliseconds, "compiled_after_s": after}


def described(shape: Shape, case: Case) -> dict[str, Any]:
    """A row before it is measured."""
    return {"shape": vars(shape), "kernel": case.name, "bytes": case.bytes}


def measured(context: Context, shape: Shape, case: Case, copy: float | None) -> dict[str, Any]:
    """Times in ms, and the share of the time that the copy bandwidth would allow."""
    row = described(shape, case)
    with torch.no_grad():
        try:
            wanted = [t.clone() for t in case.read(case.op(*case.args))] if case.op is not add_weight_grad_ else None
            row["eager_ms"] = context.milliseconds(lambda: case.op(*case.args), seconds=0.2)
            if context.cuda:
                triton = triton_of(case.op)
                if wanted is not None:
                    row["error"] = relative_error(case.read(triton(*case.args)), wanted)
                    if not row["error"] < (1e-2 if context.dtype == torch.bfloat16 else 1e-5):
                        row["problem"] = f"differs from its twin by {row['error']:.1e}"
                del wanted
                row["triton_ms"] = context.milliseconds(lambda: triton(*case.args), seconds=0.2)
                if copy:
                    row["roofline"] = case.bytes / (row["triton_ms"] * 1e6) / copy
        except Exception as error:
            row["problem"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
    return row


def _text(row: dict[str, Any]) -> str:
    times = ", ".join(f"{name[:-3]} {row[name]:.3f} ms" for name in row if name.endswith("_ms"))
    share = f", {row['roofline']:.0%} of the roofline" if "roofline" in row else ""
    return times + share + (f", {row['problem']}" if "problem" in row else "")
