"""Model chunks as Megatron-Core has them, and calls of its forward-backward functions."""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overlap1f1b.engine import Engine, EngineOptions, split_blocks
from overlap1f1b.integrations.megatron import ForwardBackward, get_forward_backward_func
from overlap1f1b.integrations.megatron.forward_backward import engines_of
from tests import models
from tests.engines import COSTS

LAYERS = 4  # with embedding, dense block and head 7 modules
Item = tuple[Tensor, Tensor]


class Part(nn.Module):
    """A model chunk: some modules of the model, with embedding and head apart from the layers."""

    def __init__(self, modules: list[nn.Module], config: object, *, first: bool, last: bool) -> None:
        super().__init__()
        self.embedding = modules.pop(0) if first else None
        self.head = modules.pop() if last else None
        self.layers = nn.ModuleList(modules)
        self.scale = nn.Parameter(torch.ones(models.H))  # a parameter of no module
        self.config, self.input_tensor = config, None

    def set_input_tensor(self, tensors: list[Any]) -> None:
        (self.input_tensor,) = tensors

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.input_tensor if self.embedding is None else self.embedding(tokens)
        x = x * self.scale
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(x)


class Listed(nn.Sequential):
    """A chunk without a forward of its own."""

    def set_input_tensor(self, tensors: list[Any]) -> None:
        assert tensors == [None]


class Wrapped(nn.Module):
    """Wraps a module as a data-parallel wrapper does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)


def build(
    stages: int,
    group: Any = None,
    config: object = None,
    block: type[models.Block] = models.Block,
    layers: int = LAYERS,
) -> list[Part]:
    """Return the whole model in this number of chunks."""
    parts = split_blocks(list(models.build(group, layers=layers, block=block)), stages)
    return [Part(part, config, first=i == 0, last=i == stages - 1) for i, part in enumerate(parts)]


def loss_func(target: Tensor, output: Tensor, non_loss_data: bool = False) -> Any:
    if non_loss_data:
        return {"logits": output.detach().clone()}
    loss = models.loss_fn(output, target)
    return loss, {"loss": loss.detach().clone()}


def forward_step(data_iterator: Iterator[Item], model: nn.Module, function: Callable[..., Any] = loss_func) -> Any:
    tokens, target = next(data_iterator)
    return model(tokens), partial(function, target)


def items(microbatches: int, *, sequence: int = 7, seed: int = 5) -> list[Item]:
    return [models.batch(1, sequence=sequence, seed=seed + m) for m in range(microbatches)]


def plain(parts: list[Part], data: list[Item], scale: float = 1.0) -> list[Tensor]:
    """Run a plain loop over the microbatches; return the losses."""
    losses = []
    for tokens, target in data:
        x = tokens
        for part in parts:
            part.set_input_tensor([x])
            x = part(x)
        loss = models.loss_fn(x, target)
        (loss / len(data) * scale).backward()
        losses.append(loss.detach())
    return losses


def call(forward_backward: ForwardBackward, parts: list[Part], data: list[Item], **more: Any) -> list[Any]:
    iterators = [iter(data) for _ in parts]
    alone = len(parts) == 1 and "interleav" not in forward_backward.__name__
    given = {"forward_step_func": forward_step, "seq_length": 7, "micro_batch_size": 2, **more}
    return forward_backward(
        data_iterator=iterators[0] if alone else iterators,
        model=parts[0] if alone else parts,
        num_microbatches=len(data),
        **given,
    )


def combined(**options: Any) -> ForwardBackward:
    """Return the function that opens several forwards at once, without a pipeline."""
    given = EngineOptions(costs=COSTS, **options)
    return get_forward_backward_func(schedule="combined_1f1b_schedule_for_no_pipelining", options=given)


def engine_of(function: ForwardBackward, model: nn.Module) -> Engine:
    """Return the engine by which a function plays a model, which holds it."""
    ((made,),) = (made for of, made in engines_of(model).items() if of is function)
    return made.engine


def with_config(**fields: Any) -> tuple[ForwardBackward, Part, SimpleNamespace]:
    config = SimpleNamespace(**fields)
    return combined(verify=False), build(1, config=config)[0], config


def fake(monkeypatch: pytest.MonkeyPatch, name: str, **members: object) -> SimpleNamespace:
    """Register a stand-in for a module of Megatron-Core, as if it were imported."""
    module = SimpleNamespace(**members)
    monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
    return module
