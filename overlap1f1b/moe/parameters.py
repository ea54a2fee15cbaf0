"""Each expert's weights as parameters of their own, for optimizers that work on a whole matrix.

    experts, others = parameter_groups(engine)
    muon = torch.optim.Muon(experts["params"])

A stacked weight ``[E_local, rows, columns]`` is one parameter of a model. An optimizer that normalizes, factorizes or
orthogonalizes it takes the experts of a rank together, so its result depends on how many a rank has. Here each expert
is a leaf that shares memory with its part of the stack. Its gradient is read from the stack's, so sums over ranks,
clipping and scaling act on both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from overlap1f1b.moe.experts import Experts
from overlap1f1b.schedule.values import checked, quoted


class Trained(Protocol):
    """What has parameters in modules: an engine, or a module."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters."""

    def modules(self) -> Iterator[nn.Module]:
        """Return the modules, with all inside them."""


class Stack:
    """A stacked weight ``[E_local, ...]``, perhaps a DTensor sharded there, whose experts are parameters."""

    def __init__(self, weight: nn.Parameter) -> None:
        self.weight = weight
        self._partly: Tensor | None = None  # the gradient that some experts have dropped
        self._dropped: dict[int, int] = {}  # these experts, with the version that the gradient had then
        if isinstance(weight, DTensor) and any(p.is_shard() and not p.is_shard(0) for p in weight.placements):
            raise ValueError(
                f"a stacked weight {list(weight.shape)} with placements {weight.placements}; "
                "allowed: sharded by experts, along dimension 0"
            )

    @property
    def experts(self) -> list[ExpertParameter]:
        """This rank's experts, made anew."""
        return [ExpertParameter(self, place) for place in range(len(self.values()))]

    def values(self) -> Tensor:
        """Return this rank's part of the weight."""
        return _local(self.weight)

    def grad(self, place: int) -> Tensor | None:
        """Return an expert's part of the gradient, or None if it has none or has dropped it."""
        grad = self.weight.grad
        if grad is None:
            self._forget()
            return None
        values = _local(grad)
        if self._partly is not None and (
            grad is not self._partly or self._dropped.get(place, values._version) != values._version
        ):
            left = min(set(range(len(values))) - self._dropped.keys())
            raise RuntimeError(
                f"expert {left} of a stacked weight {list(self.weight.shape)} has kept its gradient where others have "
                "dropped theirs; allowed: all experts of a weight in optimizers that drop their gradients"
            )
        return None if place in self._dropped else values[place]

    def drop(self, place: int) -> None:
        """Drop an expert's part of the gradient; the gradient goes when all have dropped theirs."""
        if (part := self.grad(place)) is not None:
            self._dropped[place], self._partly = part._version, self.weight.grad
            if len(self._dropped) == len(self.values()):
                self.weight.grad = None
                self._forget()

    def _forget(self) -> None:
        self._partly = None
        self._dropped.clear()

    def set(self, place: int, grad: Tensor) -> None:
        """Set an expert's part of the gradient."""
        if self.weight.grad is None:
            self.weight.grad = torch.zeros_like(self.weight)
        self._dropped.pop(place, None)
        _local(self.weight.grad)[place].copy_(grad)


class ExpertParameter(nn.Parameter):
    """One expert's part of a stacked weight: a leaf that shares memory and gradient with it."""

    stack: Stack  # the stacked weight
    place: int  # position of the expert in this rank's part of it

    def __new__(cls, stack: Stack, place: int) -> ExpertParameter:
        """Return a leaf without memory of its own."""
        made: ExpertParameter = torch.Tensor._make_subclass(cls, stack.values()[place], True)
        return made

    def __init__(self, stack: Stack, place: int) -> None:
        self.stack, self.place = stack, place

    @property
    def grad(self) -> Tensor | None:
        """Part of the stack's gradient, in its memory."""
        if self.stack.values()[self.place].data_ptr() != self.data_ptr():
            raise RuntimeError(
                f"a stacked weight {list(self.stack.weight.shape)} has other memory than when its experts became "
                "parameters; allowed: parameter_groups after a model is moved, converted or replaced"
            )
        return self.stack.grad(self.place)

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        if grad is None:
            self.stack.drop(self.place)
        else:
            self.stack.set(self.place, grad)


def _local(tensor: Tensor) -> Tensor:
    local: Tensor = tensor.detach()
    return local.to_local() if isinstance(local, DTensor) else local


@checked
def parameter_groups(model: Trained, stacked: Iterable[nn.Parameter] = ()) -> list[dict[str, Any]]:
    """Return two parameter groups: each expert's weights apart, and all other trained parameters of a model.

    >>> experts, others = parameter_groups(engine)
    >>> matrices = [*experts["params"], *(p for p in others["params"] if p.ndim == 2)]
    >>> muon = torch.optim.Muon(matrices)

    All of them belong in optimizers. Each has memory and ``.grad`` of the model's own parameter, so
    ``engine.clip_gradients`` and ``optimizer.zero_grad()`` act as ever.

    Args:
        model: An engine or a module.
        stacked: Stacked weights ``[E_local, ...]`` in layers of a user's own, beside those of Experts.

    Raises:
        ValueError: A stacked weight is a DTensor that is sharded inside its experts, or is none of the model's.
    """
    if not all(callable(getattr(model, name, None)) for name in ("parameters", "modules")):
        raise ValueError(f"model={quoted(model)}; allowed: an Engine or a module")
    found, trained = dict.fromkeys(stacked), [p for p in model.parameters() if p.requires_grad]
    if strange := [one for one in found if all(one is not p for p in trained)]:
        what = f"stacked has {quoted(strange[0])}, which the model does not train"
        raise ValueError(f"{what}; allowed: a list of stacked weights of the model")
    for experts in (module for module in model.modules() if isinstance(module, Experts)):
        every = experts.parameters()
        found |= dict.fromkeys(p for p in every if p.ndim > 1 and p.shape[0] == experts.local_experts)
    apart = [one for p in trained if p in found for one in Stack(p).experts]
    return [{"params": apart}, {"params": [p for p in trained if p not in found]}]
