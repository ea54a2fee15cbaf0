"""Chunks that are cut at their exchanges, whatever way gradients take, against a plain loop."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from overlap1f1b.engine import EngineOptions
from overlap1f1b.integrations.megatron import get_forward_backward_func
from tests import models
from tests.engines import COSTS
from tests.integrations.megatron.chunks import (
    LAYERS,
    Listed,
    Part,
    build,
    call,
    combined,
    engine_of,
    items,
    plain,
    with_config,
)


def test_autocast() -> None:
    def dense() -> Listed:
        torch.manual_seed(0)
        return Listed(nn.Embedding(models.V, models.H), nn.Linear(models.H, models.H), nn.Linear(models.H, models.V))

    function, model, reference = get_forward_backward_func(options=EngineOptions(costs=COSTS)), dense(), dense()
    model.config = SimpleNamespace(enable_autocast=True, autocast_dtype=torch.bfloat16)  # type: ignore[assignment]
    data = items(3)
    losses = []
    for tokens, target in data:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = models.loss_fn(reference(tokens), target)
        losses.append(loss.detach())
        (loss / len(data)).backward()
    reports = call(function, [model], data)  # type: ignore[list-item]
    assert [report["loss"] for report in reports] == losses
    assert models.equal(models.gradients(model), models.gradients(reference)) == []
    collected = call(function, [model], data, forward_only=True, collect_non_loss_data=True)  # type: ignore[list-item]
    assert collected[0]["logits"].dtype is torch.bfloat16


def test_the_first_microbatch_is_marked() -> None:
    function, part, _ = with_config()
    marked: list[int] = []
    part.set_is_first_microbatch = lambda: marked.append(1)  # type: ignore[assignment]
    call(function, [part], items(3))
    assert len(marked) == 1
    for first in (None, True, False):
        call(function, [part], items(3), forward_only=True, first_val_step=first)
    assert len(marked) == 3


def test_a_chunk_is_one_block_that_is_cut_at_its_experts() -> None:
    function = get_forward_backward_func(options=EngineOptions(costs=COSTS))
    (part,) = build(1)
    call(function, [part], items(1))
    (shape,) = engine_of(function, part).stages[0].shape
    assert shape.expert_calls == LAYERS


class Passes(Part):
    """The last layer gets the sum of two tensors, the earlier of which passes all other layers."""

    def forward(self, tokens: Tensor) -> Tensor:
        early = self.embedding(tokens)
        return self.head(self.layers[-1](nn.Sequential(*self.layers[:-1])(early) + early))


class Leaves(Part):
    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers[0](self.embedding(tokens)))


@pytest.mark.parametrize("kind", [Passes, Leaves])
def test_gradients_may_go_round_a_layer(kind: type[Part]) -> None:
    function = combined()
    cut, reference = (kind(list(models.build(layers=LAYERS)), None, first=True, last=True) for _ in range(2))
    data = items(3)
    if kind is Leaves:  # experts that are not called are an error
        with pytest.raises(ValueError, match="exchanges rows 2 times and holds 4 Experts; allowed: one call of each"):
            call(function, [cut], data)
        return
    call(function, [cut], data)
    plain([reference], data)
    assert models.equal(models.gradients(cut), models.gradients(reference)) == []


class Checkpointed(nn.Module):
    """Runs a module inside a checkpoint that runs its own backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=True)


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.weight = nn.LayerNorm(models.H), nn.Parameter(torch.randn(models.H, models.H) / 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(x) @ self.weight)


@pytest.mark.parametrize("inner", [Product, models.Block])
def test_a_checkpoint_that_runs_a_backward_of_its_own(inner: type[nn.Module]) -> None:
    def part() -> Part:
        torch.manual_seed(8)
        layers = [Checkpointed(inner()), models.Block(), Checkpointed(Product())]
        ends = [nn.Embedding(models.V, models.H), nn.Linear(models.H, models.V)]
        return Part([ends[0], *layers, ends[1]], None, first=True, last=True)

    function = combined(verify=False)
    cut, reference = part(), part()
    fired: dict[str, int] = {}
    for name, parameter in cut.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.update({name: fired.get(name, 0) + 1}))
    data = items(4)
    plain([reference], data)
    call(function, [cut], data)
    assert models.equal(models.gradients(cut), models.gradients(reference)) == []
    assert fired == dict.fromkeys(dict(cut.named_parameters()), len(data))
