"""Experts in eight bits beside bfloat16: the layer, its products, what quantizes, and the product against its twin."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpu_bench.context import Context, relative_error
from gpu_bench.kernels import Shape
from gpu_bench.layer import LAYERS
from gpu_bench.model import drawn_on_the_device
from overlap1f1b.kernels.fp8 import dequantized, quantize_rows
from overlap1f1b.kernels.grouped_mm import EightBits, ExpertRows, GroupedMM, grouped_mm
from overlap1f1b.moe import GroupedExperts
from overlap1f1b.moe.experts import Precision

TINY = (Shape("tiny", 32, 16, 16, 2, 4),)
SHARED = Shape("fine-grained, a rank of eight", 8192, 2048, 768, 8, 16)
"""As many rows as the layer has on one rank, and an eighth of its experts, whose weights are quantized as often."""
PRECISIONS: tuple[Precision | None, ...] = (None, "fp8")


def run(context: Context) -> dict[str, Any]:
    """Forward and input gradient; of the layer's weights no gradient, which is the same in both.

    The layer's weights are quantized once, as in a step of the engine, those of the product alone in each call.
    """
    found: dict[str, Any] = {"rows": [], "problems": []}
    for shape in TINY if context.tiny else (*LAYERS, SHARED):
        row: dict[str, Any] = {"shape": vars(shape)}
        found["rows"].append(row)
        layer(context, shape, row)
        context.free()
        products(context, shape, row)
        row["layer_speedup"] = row["bf16_both_ms"] / row["fp8_both_ms"]
        context.say(f"{shape.name}: " + ", ".join(f"{k} {v:.3g}" for k, v in row.items() if isinstance(v, float)))
        for name, most in (("error", 5e-3), ("input_grad_error", 5e-3), ("layer_error", 0.1)):
            if not row[name] < most:
                found["problems"].append(f"{shape.name}: {name} {row[name]:.1e}, allowed {most}")
        context.free()
    return found


def routed(context: Context, s: Shape) -> Tensor:
    """Uneven choices; the last expert has no row, and rows of the others begin anywhere."""
    logits = context.randn(s.T, s.E, dtype=torch.float32, seed=3) - torch.arange(s.E, device=context.device) / s.E
    logits[:, -1] = -torch.inf
    return logits.topk(s.K, -1).indices


def layer(context: Context, s: Shape, row: dict[str, Any]) -> None:
    """Times of the experts of a layer on one rank, and how far they are from bfloat16's."""
    indices, weights = routed(context, s), context.randn(s.T, s.K, seed=4).softmax(-1)
    x, g, results = context.randn(s.T, s.H, seed=1), context.randn(s.T, s.H, seed=2), []
    state: dict[str, Any] = {}
    for precision in PRECISIONS:
        name = precision or "bf16"
        with drawn_on_the_device():
            experts = GroupedExperts(s.E, s.H, s.I, precision=precision, dtype=context.dtype, device=context.device)
        experts.load_state_dict(state or experts.state_dict())
        state = experts.state_dict()
        experts.requires_grad_(False)
        eight = EightBits(experts.kernels, precision, keeps=True) if precision else None  # as in a step of the engine
        vars(experts)["product"] = lambda *operands, eight=eight: GroupedMM.apply(*operands, eight)
        leaf = x.clone().requires_grad_()

        def both(experts: GroupedExperts = experts, leaf: Tensor = leaf) -> None:
            leaf.grad = None
            experts(leaf, indices, weights).backward(g)

        with torch.no_grad():
            y = experts(x, indices, weights)
            row[f"{name}_forward_ms"] = context.milliseconds(lambda experts=experts: experts(x, indices, weights))
        row[f"{name}_both_ms"] = context.milliseconds(both)
        results.append([y, leaf.grad.clone()])
    row["layer_error"] = relative_error(*reversed(results))


def products(context: Context, s: Shape, row: dict[str, Any]) -> None:
    """Times of the first product alone and of what quantizes for it, and the product against the twin's arithmetic."""
    counts = ExpertRows(torch.bincount(routed(context, s).flatten(), minlength=s.E).cumsum(0, dtype=torch.int32))
    rows, grad = context.randn(s.T * s.K, s.H), context.randn(s.T * s.K, 2 * s.I, seed=1)
    weight = context.randn(s.E, 2 * s.I, s.H, seed=2)
    kernels = GroupedExperts(s.E, s.H, s.I, device="meta").kernels
    eight = EightBits(kernels, "fp8")
    with torch.no_grad():
        for name, found, left, right in (
            ("error", eight.grouped_mm(rows, weight, counts), rows, weight),
            ("input_grad_error", eight.input_grad(grad, weight, counts), grad, weight.mT),
        ):
            # The twin expert by expert, so that no float32 copy of all weights is made.
            errors, start = [0.0, 0.0], 0
            for expert, count in enumerate(list(counts)):
                part = slice(start, start + count)
                a, b = (dequantized(quantize_rows(x), torch.float32) for x in (left[part], right[expert]))
                wanted = a @ b.t()
                errors[0] += float((found[part].float() - wanted).double().square().sum())
                errors[1] += float(wanted.double().square().sum())
                start += count
            row[name] = (errors[0] / errors[1]) ** 0.5
        row["bf16_product_ms"] = context.milliseconds(lambda: grouped_mm(rows, weight, counts))
        row["fp8_product_ms"] = context.milliseconds(lambda: eight.grouped_mm(rows, weight, counts))
        row["quantize_rows_ms"] = context.milliseconds(lambda: kernels(quantize_rows, rows))
        row["quantize_weight_ms"] = context.milliseconds(lambda: kernels(quantize_rows, weight))
        row["quantize_transposed_ms"] = context.milliseconds(lambda: kernels(quantize_rows, weight.mT))
        row["quantize_gb_s"] = 3 * rows.numel() / row["quantize_rows_ms"] / 1e6
        if context.cuda:
            (a, of_rows), (b, of_weight) = quantize_rows(rows), quantize_rows(weight)
            for fast in (False, True):
                options = {"offs": counts.ends, "out_dtype": torch.bfloat16, "use_fast_accum": fast}
                row[f"scaled_product_{'fast' if fast else 'exact'}_ms"] = context.milliseconds(
                    lambda options=options: torch._scaled_grouped_mm(a, b.mT, of_rows, of_weight, **options)
                )
