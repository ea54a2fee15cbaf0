"""Layers whose backward leaves the gradient of their weight to a queue."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overlap1f1b.cut.edges import as_dtype, asks_for
from overlap1f1b.kernels.choice import Kernels
from overlap1f1b.kernels.grouped_mm import (
    EightBits,
    add_weight_grad_,
    grouped_mm,
    grouped_mm_input_grad,
    grouped_mm_weight_grad,
    offsets,
    product_dtype,
)
from overlap1f1b.transport.functions import direct, quick_apply

Put = Callable[[nn.Parameter, Callable[[], Tensor | None]], object]
"""It leaves a weight's gradient to be computed later, by a function that returns None if it has added it elsewhere."""


@direct
class SplitLinear(torch.autograd.Function):
    """``F.linear`` whose backward computes the gradients of input and bias, and queues the weight's.

    The weight comes in a tuple, so that no edge of the graph leads to it: its hooks must not run before its gradient is
    there. The ``anchor``, an empty leaf, makes the result require a gradient if nothing else does, and shows which
    walks ask for the weight's (:func:`asks_for`). ``add``, if given, takes the gradient of the result ``[R, O]`` and
    the input ``[R, I]``, and adds the weight's gradient elsewhere.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: tuple[nn.Parameter],
        bias: Tensor | None,
        put: Put,
        anchor: Tensor,
        add: Callable[[Tensor, Tensor], Tensor | None] | None = None,
    ) -> Tensor:
        """Multiply as ``F.linear`` does; keep input and weight for the backward, in autocast's dtype."""
        kind, (weight,) = x.device.type, weights
        casts = torch.is_autocast_enabled(kind) and x.dtype is not torch.float64  # which autocast leaves alone
        cast = torch.get_autocast_dtype(kind) if casts else None
        ctx.held = cast, x.dtype, put, weight, add  # one attribute, since each takes a while
        if cast is not None:
            x = x.to(cast)
        ctx.save_for_backward(x, weight)
        out = F.linear(x, weight, bias)  # autocast, if it is on, casts weight and bias here as it does outside
        # The output of a Function that is a view must not be changed in place, as ReLU(inplace=True) does.
        return out if out._base is None else torch.ops.aten._unsafe_view(out, out.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None, None]:
        """Return the gradients of input and bias; put the weight's into the queue."""
        (grad,), (x, weight), needed = grads, ctx.saved_tensors, ctx.needs_input_grad
        (cast, of_x, put, parameter, add), dtype = ctx.held, weight.dtype

        def weight_grad() -> Tensor | None:  # without the weight, which a hook may have brought back from elsewhere
            if add is not None:
                return add(_flat(grad), _flat(x))
            return as_dtype(_flat(grad).t() @ _flat(x), dtype)

        if asks_for(parameter, ctx):
            put(parameter, weight_grad)
        matrix = weight if cast is None else weight.to(cast)
        grad_x = as_dtype(grad @ matrix, of_x) if needed[0] else None
        grad_bias = as_dtype(_flat(grad).sum(0), dtype) if needed[2] else None
        return grad_x, None, grad_bias, None, None, None


def _flat(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


@direct
class SplitGroupedMM(torch.autograd.Function):
    """``grouped_mm`` whose backward computes the gradient of the rows, and queues the weight's.

    Weight and anchor are as in :class:`SplitLinear`. With ``kernels`` the weight's gradient is added to its main
    gradient, if there is one. ``eight``, if given, makes the products of rows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weights: tuple[nn.Parameter],
        counts: Sequence[int],
        put: Put,
        kernels: Kernels | None,
        anchor: Tensor | None,
        eight: EightBits | None,
    ) -> Tensor:
        """Multiply each expert's rows by its weight; keep the rows if the weight is trained."""
        (weight,) = weights
        ctx.held = counts, put, weight, kernels, eight, rows.dtype
        rows = as_dtype(rows, product_dtype(weight))
        ctx.save_for_backward(rows if weight.requires_grad else None, weight)  # frozen weights need no rows
        return (eight.grouped_mm if eight else grouped_mm)(rows, weight, counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the rows; put the weight's into the queue."""
        (grad,), (rows, weight) = grads, ctx.saved_tensors
        (counts, put, parameter, kernels, eight, of_rows), dtype = ctx.held, weight.dtype
        main = None if kernels is None else main_grad(parameter)

        def weight_grad() -> Tensor | None:
            if main is None:
                return as_dtype(grouped_mm_weight_grad(grad, rows, counts), dtype)
            kernels(add_weight_grad_, main, grad, rows, offsets(counts, grad))
            return added_to_main(parameter)

        if asks_for(parameter, ctx):
            put(parameter, weight_grad)
        found = None
        if ctx.needs_input_grad[0]:
            found = (eight.input_grad if eight else grouped_mm_input_grad)(grad, weight, counts)
            found = as_dtype(found, of_rows)
        return found, None, None, None, None, None, None


split_linear = quick_apply(SplitLinear, one=True)
split_grouped_mm = quick_apply(SplitGroupedMM, one=True)


def main_grad(parameter: nn.Parameter) -> Tensor | None:
    """Return the float32 buffer of a parameter's gradient that Megatron calls ``main_grad``; None without one."""
    main = getattr(parameter, "main_grad", None)
    if not isinstance(main, Tensor) or main.dtype != torch.float32 or main.shape != parameter.shape:
        return None
    return main if main.is_contiguous() else None


def added_to_main(parameter: Any) -> Tensor | None:
    """Return what stands for a gradient that was added to ``main_grad``; None if no hook waits for one.

    Megatron's hooks wait for a gradient, and ``grad_added_to_main_grad`` tells them not to add it: its values are never
    read, unless ``zero_out_wgrad`` says that they are added.
    """
    if not hasattr(parameter, "grad_added_to_main_grad"):
        return None
    parameter.grad_added_to_main_grad = True
    made = torch.zeros_like if getattr(parameter, "zero_out_wgrad", False) else torch.empty_like
    return made(parameter)
