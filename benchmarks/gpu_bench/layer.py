"""One MoE layer, forward and backward, against its matrix products alone and a loop over the experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_bench.context import Context, relative_error
from gpu_bench.kernels import Shape
from gpu_bench.model import drawn_on_the_device
from overlap1f1b.kernels.grouped_mm import ExpertRows, grouped_mm, grouped_mm_input_grad, grouped_mm_weight_grad
from overlap1f1b.moe import MoE, RouterConfig
from overlap1f1b.moe.experts import WeightsIn

LAYERS = (Shape("fine-grained", 8192, 2048, 768, 8, 128), Shape("coarse", 8192, 4096, 8192, 2, 8))
TINY = (Shape("tiny", 32, 16, 8, 2, 4),)


def run(context: Context) -> dict[str, Any]:
    """TFLOP/s count the experts' matrix products, 18·T·K·H·I; the router is part of the time."""
    found: dict[str, Any] = {"rows": [], "problems": []}
    for shape in TINY if context.tiny else LAYERS:
        row = found["rows"]
        row.append(measured(context, shape))
        context.say(", ".join(f"{k} {v:.3g}" for k, v in row[-1].items() if isinstance(v, float)))
        for name, other in (("error", "the loop"), ("inside_error", "weights in the sum")):
            if not row[-1][name] < 5e-2:
                found["problems"].append(f"{shape.name}: differs from {other} by {row[-1][name]:.1e}")
        context.free()
    return found


def measured(context: Context, s: Shape) -> dict[str, Any]:
    """One layer."""
    with drawn_on_the_device():
        layer, inside = (
            MoE(s.H, s.I, RouterConfig(s.E, s.K), weights_in=where, dtype=context.dtype, device=context.device)
            for where in get_args(WeightsIn)
        )
    inside.load_state_dict(layer.state_dict())
    x, g = context.randn(s.T, s.H, seed=1), context.randn(s.T, s.H, seed=2)
    experts, flops = layer.experts, 18.0 * s.T * s.K * s.H * s.I
    with torch.no_grad():
        indices, weights = layer.router(x)
    row: dict[str, Any] = {"shape": vars(s), "flops": flops}
    # The loop has a parameter for each expert, as a list of modules would: the gradient of a slice is as large as all.
    gate_ups, downs = ([w.detach().requires_grad_() for w in every] for every in (experts.gate_up, experts.down))
    apart = (*gate_ups, *downs)

    def both(call: Callable[[Tensor], Tensor]) -> tuple[Callable[[], Tensor], Callable[[], None]]:
        leaf = x.clone().requires_grad_()

        def forward() -> Tensor:
            return call(leaf)

        def step() -> None:
            for parameter in (*layer.parameters(), *inside.parameters(), *apart, leaf):
                parameter.grad = None
            call(leaf).backward(g)

        return forward, step

    def loop(tokens: Tensor) -> Tensor:
        y = torch.zeros_like(tokens)
        for expert in range(s.E):  # what a plain implementation does: it waits for the device at every expert
            token, choice = torch.where(indices == expert)
            gate, up = F.linear(tokens[token], gate_ups[expert]).chunk(2, -1)
            out = F.linear(F.silu(gate) * up, downs[expert])
            y.index_add_(0, token, out * weights[token, choice].unsqueeze(1))
        return y

    forward, step = both(layer)
    row["forward_ms"] = context.milliseconds(forward)
    row["both_ms"] = context.milliseconds(step)
    row["both_tflop_s"] = flops / row["both_ms"] / 1e9
    row["held_bytes"] = held(context, forward)
    forward, step = both(inside)
    row["inside_ms"], row["inside_held_bytes"] = context.milliseconds(step), held(context, forward)
    with torch.no_grad():
        row["inside_error"] = relative_error([inside(x)], [layer(x)])
    row["gemm_ms"] = gemms(context, s, indices, experts.gate_up.detach(), experts.down.detach())
    row["gemm_tflop_s"] = flops / row["gemm_ms"] / 1e9
    row["share_of_gemm"] = row["gemm_ms"] / row["both_ms"]
    forward, step = both(loop)
    with torch.no_grad():
        row["error"] = relative_error([layer(x)], [forward()])
    row["loop_ms"] = context.milliseconds(step, rounds=5)
    row["over_loop"] = row["loop_ms"] / row["both_ms"]
    return row


def held(context: Context, forward: Callable[[], Tensor]) -> int | None:
    """Bytes that a forward leaves for its backward, with what it returns; None on a CPU."""
    if not context.cuda:
        return None
    context.synchronize()
    before = torch.cuda.memory_allocated(context.device)
    y = forward()
    context.synchronize()
    bytes_held = torch.cuda.memory_allocated(context.device) - before
    del y
    return bytes_held


def gemms(context: Context, s: Shape, indices: Tensor, gate_up: Tensor, down: Tensor) -> float:
    """The six grouped products of forward and backward alone."""
    counts = ExpertRows(torch.bincount(indices.flatten(), minlength=s.E).cumsum(0, dtype=torch.int32))
    R = s.T * s.K
    rows, wide, narrow = context.randn(R, s.H), context.randn(R, 2 * s.I, seed=1), context.randn(R, s.I, seed=2)

    def products() -> None:
        grouped_mm(rows, gate_up, counts)
        grouped_mm(narrow, down, counts)
        grouped_mm_input_grad(rows, down, counts)
        grouped_mm_input_grad(wide, gate_up, counts)
        grouped_mm_weight_grad(rows, narrow, counts)
        grouped_mm_weight_grad(wide, rows, counts)

    return context.milliseconds(products)
