"""Stand-ins for TransformerEngine's linear layers: their contract of ``delay_wgrad_compute``, on a CPU.

They keep what TransformerEngine 2.9 was read to do: a backward puts operands and a function into ``wgrad_store``;
``backward_dw`` takes the oldest ones out, sets ``.grad`` without adding to it, and calls the hooks; with fused weight
gradients a backward returns a tensor of any values, and the parameter says that its gradient is in ``main_grad``.
"""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Hook = Callable[[], None]


class Store:
    """Operands of weight gradients that are still to be computed, first in, first out."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.context: queue.Queue[Any] = queue.Queue()

    def delay_wgrad_compute(self) -> bool:
        return self.enabled

    def put(self, operands: list[Any], function: Callable[..., Any]) -> None:
        assert self.enabled
        self.context.put((operands, function))

    def pop(self) -> Any:
        if self.context.empty():
            raise RuntimeError("the store is empty")
        operands, function = self.context.get()
        return function(*operands)


class Products(torch.autograd.Function):
    """The product of each part of some rows with its own weight."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, splits: list[int], layer: Linears, bias: Tensor | None, *weights: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.splits, ctx.layer, ctx.weights, ctx.bias = splits, layer, weights, bias
        parts = zip(x.split(splits), weights, strict=True)
        return torch.cat([F.linear(part, weight, bias) for part, weight in parts])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        layer, inputs, outputs = ctx.layer, x.split(ctx.splits), grads[0].split(ctx.splits)
        into = torch.cat([grad @ weight for grad, weight in zip(outputs, weights, strict=True)])
        fused = layer.fuse_wgrad_accumulation

        def gradients(inputs: Any, outputs: Any) -> tuple[list[Tensor | None], Tensor | None]:
            bias = None if ctx.bias is None else outputs[0].sum(0)
            found = [grad.t() @ part for grad, part in zip(outputs, inputs, strict=True)]
            if not fused:
                return list(found), bias
            for weight, grad in zip(ctx.weights, found, strict=True):
                weight.main_grad.add_(grad)
            return [None] * len(found), bias

        returned: list[Tensor | None] = [None] * len(weights)
        of_bias = None
        if layer.wgrad_store.delay_wgrad_compute():
            layer.wgrad_store.put([inputs, outputs], gradients)
        else:
            returned, of_bias = gradients(inputs, outputs)
        if fused and hasattr(ctx.weights[0], "grad_added_to_main_grad"):
            for number, weight in enumerate(ctx.weights):
                weight.grad_added_to_main_grad = True
                returned[number] = torch.full_like(weight, float("nan"))
        return into, None, None, of_bias, *returned


class Linears(nn.Module):
    """One weight or several, and the methods by which their gradients are computed later."""

    def __init__(
        self, count: int, inputs: int, outputs: int, *, config: Any, bias: bool, is_expert: bool, skip_bias_add: bool,
        **_: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.config, self.fuse_wgrad_accumulation = config, config.gradient_accumulation_fusion
        self.wgrad_store = Store(config.delay_wgrad_compute)
        self.hooks: list[Hook] = []
        self.names = [f"weight{number}" for number in range(count)] if count > 1 else ["weight"]
        for name in self.names:
            setattr(self, name, nn.Parameter(torch.empty(outputs, inputs)))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None
        self.use_bias, self.return_bias = bias, bias and skip_bias_add
        for parameter in self.parameters():
            parameter.allreduce = not (is_expert and config.expert_model_parallel_size > 1)  # type: ignore[attr-defined]
            if config.delay_wgrad_compute:
                parameter.skip_backward_post_hook = True  # type: ignore[attr-defined]

    def product(self, x: Tensor, splits: list[int]) -> tuple[Tensor, Tensor | None]:
        weights = [getattr(self, name) for name in self.names]
        bias = None if self.return_bias else self.bias
        return Products.apply(x, splits, self, bias, *weights), self.bias if self.return_bias else None

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Hook) -> None:
        self.hooks.append(hook)

    def need_backward_dw(self) -> bool:
        return self.wgrad_store.delay_wgrad_compute()

    def backward_dw(self) -> None:
        if not self.need_backward_dw():
            return
        grads, of_bias = self.wgrad_store.pop()
        for name, grad in zip(self.names, grads, strict=True):
            if not self.fuse_wgrad_accumulation:
                getattr(self, name).grad = grad
        if self.bias is not None and self.bias.grad is None:
            self.bias.grad = of_bias
        for hook in self.hooks:
            hook()


class Linear(Linears):
    """Stand-in for ``TEColumnParallelLinear`` and ``TERowParallelLinear`` on one rank of "tp"."""

    def __init__(self, inputs: int, outputs: int, **given: Any) -> None:
        super().__init__(1, inputs, outputs, **given)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        rows = x.reshape(-1, x.shape[-1])
        product, bias = self.product(rows, [len(rows)])
        return product.view(*x.shape[:-1], product.shape[-1]), bias


class NormLinear(Linear):
    """Stand-in for ``TELayerNormColumnParallelLinear``."""

    def __init__(self, inputs: int, outputs: int, **given: Any) -> None:
        super().__init__(inputs, outputs, **given)
        self.layer_norm_weight = nn.Parameter(torch.ones(inputs))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return super().forward(F.rms_norm(x, x.shape[-1:], self.layer_norm_weight))


class GroupedLinear(Linears):
    """Stand-in for ``TEGroupedLinear``."""

    def forward(self, x: Tensor, splits: list[int]) -> tuple[Tensor, Tensor | None]:
        return self.product(x, splits)


def put_into(spec: Any, *, grouped: bool) -> Any:
    """Return a layer's spec with stand-ins in the places of Megatron-Core's own linear layers."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttentionSubmodules
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
    from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

    def changed(value: Any) -> Any:
        if value in (ColumnParallelLinear, RowParallelLinear):
            return Linear
        if not dataclasses.is_dataclass(value) or isinstance(value, type):
            return [changed(one) for one in value] if isinstance(value, list) else value
        new: Any = dataclasses.replace(
            value, **{field.name: changed(getattr(value, field.name)) for field in dataclasses.fields(value)}
        )
        if isinstance(new, SelfAttentionSubmodules):
            new.linear_qkv = NormLinear
        if isinstance(new, TransformerLayerSubmodules):
            new.input_layernorm = IdentityOp
        if grouped and getattr(new, "module", None) is SequentialMLP:
            new.module, new.submodules = TEGroupedMLP, MLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)
        return new

    return changed(spec)
