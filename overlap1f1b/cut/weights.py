"""Weight gradients apart from input gradients, and where gradients enter a graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from overlap1f1b.cut.edges import as_dtype, asks_for, backward, edge_of
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


class Root(NamedTuple):
    """The graph of a tensor without the tensor: where its gradient enters, and the gradient's shape and dtype."""

    edge: GradientEdge
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Root | None:
        """Return the root of a tensor; None if it requires no gradient."""
        if not tensor.requires_grad:
            return None
        return cls(edge_of(tensor), tensor.shape, tensor.dtype, tensor.device)

    def checked(self, grad: Tensor, name: str) -> Tensor:
        """Return a gradient, for the block ``name``, on the tensor's device and in its dtype; a scalar is broadcast."""
        if grad.dim() and grad.shape != self.shape:
            raise ValueError(
                f"a gradient of shape {tuple(grad.shape)} for an output of {name}; allowed: {tuple(self.shape)}"
            )
        if (grad.device, grad.dtype) != (self.device, self.dtype):
            grad = grad.to(self.device, self.dtype)
        return grad if grad.shape == self.shape else grad.expand(self.shape)


Gradients = dict[nn.Parameter, Tensor]


class WeightQueue:
    """Weight gradients that one backward of one microbatch has left for later."""

    def __init__(self) -> None:
        self._waiting: list[tuple[nn.Parameter, Callable[[], Tensor | None]]] = []
        self._ready: Gradients = {}

    def put(self, weight: nn.Parameter, gradient: Callable[[], Tensor | None]) -> None:
        """Leave a gradient to be computed later; ``gradient`` returns None if it has added it elsewhere."""
        self._waiting.append((weight, gradient))

    def keep(self, weight: nn.Parameter, gradient: Tensor) -> None:
        """Keep a gradient that is computed already, to be added to the queued gradients of the same parameter."""
        self._ready[weight] = self._ready[weight] + gradient if weight in self._ready else gradient

    def move(self, weights: Collection[nn.Parameter], other: WeightQueue) -> None:
        """Leave the gradients of some parameters to another queue."""
        other._waiting += [entry for entry in self._waiting if entry[0] in weights]
        self._waiting = [entry for entry in self._waiting if entry[0] not in weights]

    def take(self) -> list[tuple[nn.Parameter, Callable[[], Tensor | None]]]:
        """Return the gradients that are left for later, and empty the queue."""
        taken, self._waiting = self._waiting, []
        return taken

    def compute(self) -> Gradients:
        """Return all gradients, summed per parameter, and empty the queue."""
        total, self._ready = self._ready, {}
        for weight, gradient in self._waiting:
            if (found := gradient()) is not None:
                total[weight] = total[weight] + found if weight in total else found
        self._waiting = []
        return total


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
        queue: WeightQueue,
        anchor: Tensor,
        add: Callable[[Tensor, Tensor], Tensor | None] | None = None,
    ) -> Tensor:
        kind, (weight,) = x.device.type, weights
        casts = torch.is_autocast_enabled(kind) and x.dtype is not torch.float64  # which autocast leaves alone
        ctx.cast = torch.get_autocast_dtype(kind) if casts else None
        ctx.dtype, ctx.queue, ctx.weight, ctx.add = x.dtype, queue, weight, add
        if ctx.cast is not None:
            x = x.to(ctx.cast)
        ctx.save_for_backward(x, weight)
        out = F.linear(x, weight, bias)  # autocast, if it is on, casts weight and bias here as it does outside
        # The output of a Function that is a view must not be changed in place, as ReLU(inplace=True) does.
        return out if out._base is None else torch.ops.aten._unsafe_view(out, out.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None, None]:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        cast, add, dtype = ctx.cast, ctx.add, weight.dtype

        def weight_grad() -> Tensor | None:  # without the weight, which a hook may have brought back from elsewhere
            if add is not None:
                return add(_flat(grad), _flat(x))
            return as_dtype(_flat(grad).t() @ _flat(x), dtype)

        if asks_for(ctx.weight, ctx):
            ctx.queue.put(ctx.weight, weight_grad)
        matrix = weight if cast is None else weight.to(cast)
        grad_x = as_dtype(grad @ matrix, ctx.dtype) if ctx.needs_input_grad[0] else None
        grad_bias = as_dtype(_flat(grad).sum(0), dtype) if ctx.needs_input_grad[2] else None
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
        queue: WeightQueue,
        kernels: Kernels | None,
        anchor: Tensor | None,
        eight: EightBits | None,
    ) -> Tensor:
        (weight,) = weights
        ctx.counts, ctx.queue, ctx.weight, ctx.kernels, ctx.eight = counts, queue, weight, kernels, eight
        ctx.dtype, ctx.rows_dtype = product_dtype(weight), rows.dtype
        rows = as_dtype(rows, ctx.dtype)
        ctx.save_for_backward(rows if weight.requires_grad else None, weight)  # frozen weights need no rows
        if eight is not None:
            return eight.grouped_mm(rows, weight, counts)
        return grouped_mm(rows, as_dtype(weight, ctx.dtype), counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (rows, weight), counts = grads, ctx.saved_tensors, ctx.counts
        parameter, kernels, dtype = ctx.weight, ctx.kernels, weight.dtype
        main = None if kernels is None else main_grad(parameter)

        def weight_grad() -> Tensor | None:
            if main is None:
                return as_dtype(grouped_mm_weight_grad(grad, rows, counts), dtype)
            kernels(add_weight_grad_, main, grad, rows, offsets(counts, grad))
            return added_to_main(parameter)

        if asks_for(parameter, ctx):
            ctx.queue.put(parameter, weight_grad)
        of_rows = None
        if ctx.needs_input_grad[0]:
            if ctx.eight is not None:
                of_rows = ctx.eight.input_grad(grad, weight, counts)
            else:
                of_rows = grouped_mm_input_grad(grad, as_dtype(weight, ctx.dtype), counts)
            of_rows = as_dtype(of_rows, ctx.rows_dtype)
        return of_rows, None, None, None, None, None, None


split_linear = quick_apply(SplitLinear)
split_grouped_mm = quick_apply(SplitGroupedMM)


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


def accumulate(gradients: Gradients) -> None:
    """Add to ``.grad`` through each parameter's own autograd node, so that hooks fire as in any backward."""
    if not gradients:
        return
    for parameter in gradients:
        if parameter.is_leaf and parameter.grad is None:  # a parametrised weight is no leaf
            break
    else:
        backward(list(gradients), list(gradients.values()))
        return
    # Autograd takes a first gradient as ``.grad`` without a copy only if nothing else refers to it.
    parameters, box = list(gradients), list(gradients.values())
    gradients.clear()
    with torch.enable_grad():
        root = _Deliver.apply(box, *parameters)
    torch.autograd.backward(root)


class _Deliver(torch.autograd.Function):
    """A scalar whose backward gives each parameter its gradient from the box."""

    @staticmethod
    def forward(ctx: Any, box: list[Tensor], *parameters: nn.Parameter) -> Tensor:
        ctx.box = box
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        delivered = (None, *ctx.box)
        ctx.box.clear()
        return delivered
