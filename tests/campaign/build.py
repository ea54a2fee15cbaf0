"""Models and batches of a case: the same on whatever ranks."""

from collections.abc import Sequence
from random import Random
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from overlap1f1b.moe import GroupedExperts, Router, RouterConfig
from tests import models
from tests.blocks import Odd
from tests.campaign.draw import Case, Model

NOTHING = -100
"""Target that counts for nothing."""
PADDING = 0
"""Token that is none, where a case has padding."""


class Layer(nn.Module):
    """A norm or none, then calls of experts; tensors beside the hidden states are changed on their way.

    With a mask of real tokens beside, router and experts get it on the ranks of a group, and elsewhere real tokens
    alone.
    """

    def __init__(self, model: Model, calls: int, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        hidden, self.top_k, self.first = model.hidden, model.top_k, model.routing == "first"
        self.masks = group is not None
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) if model.norm else nn.Identity() for _ in range(calls))
        losses = 0.1 * (model.routing == "balanced")
        config = RouterConfig(model.experts, model.top_k, aux_coefficient=losses, z_coefficient=losses / 2)
        self.routers = nn.ModuleList(Router(hidden, config) for _ in range(calls))
        self.experts = nn.ModuleList(
            GroupedExperts(model.experts, hidden, model.intermediate, group=group, weights_in=model.weights_in)
            for _ in range(calls)
        )
        for number, experts in enumerate(self.experts):
            experts.reset_parameters(torch.Generator().manual_seed(number), std=0.5)
        self.post = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(calls))
        self.dropout = nn.Dropout(model.dropout)

    def forward(self, x: Tensor, *beside: Tensor) -> Tensor | tuple[Tensor, ...]:
        mask = next((other.flatten() for other in beside if other.dtype == torch.bool), None)
        for norm, router, experts, post in zip(self.norms, self.routers, self.experts, self.post, strict=True):
            tokens = norm(x).flatten(0, -2)
            if mask is None or self.masks:
                y = self.routed(router, experts, tokens, mask)
            else:
                y = torch.zeros_like(tokens)
                y = y.index_put((mask,), self.routed(router, experts, tokens[mask], None).to(y.dtype))
            y = post(y).tanh()  # or several layers without a norm would diverge
            x = x + self.dropout(y).view_as(x)
        return with_beside(x, beside)

    def routed(self, router: nn.Module, experts: nn.Module, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """Experts' outputs of tokens."""
        indices, weights = router(tokens, mask)
        if self.first:  # all other experts, and most ranks, receive nothing
            indices = torch.arange(self.top_k).expand_as(indices).where(indices >= 0, -1)
        return experts(tokens, indices, weights)


class Dense(nn.Module):
    """A layer without experts."""

    def __init__(self, model: Model, kind: str) -> None:
        super().__init__()
        hidden = model.hidden
        if kind == "norm":
            self.inner: nn.Module = nn.LayerNorm(hidden)
        else:
            self.inner = nn.Sequential(nn.Linear(hidden, hidden) if kind == "dense" else Odd(kind, hidden), nn.Tanh())

    def forward(self, x: Tensor, *beside: Tensor) -> Tensor | tuple[Tensor, ...]:
        return with_beside(self.inner(x), beside)


class Entry(nn.Embedding):
    """An embedding that sends tensors along: a second embedding's values, the tokens themselves, and a mask."""

    def __init__(self, model: Model) -> None:
        super().__init__(models.V, model.hidden)
        self.beside, self.masked = model.beside, model.masked

    def forward(self, tokens: Tensor) -> Tensor | tuple[Tensor, ...]:
        x = super().forward(tokens)
        masks = (tokens != PADDING,) if self.masked else ()
        return with_beside(x, (*(x.sin(), tokens)[: self.beside], *masks))


class Head(nn.Module):
    """Logits, of all that arrives."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(models.V, model.hidden) * 0.3)

    def forward(self, x: Tensor, *beside: Tensor) -> Tensor:
        for other in beside:
            x = x + (other if other.is_floating_point() else 0.01 * other.unsqueeze(-1))
        return F.linear(x, self.weight)


def with_beside(x: Tensor, beside: Sequence[Tensor]) -> Tensor | tuple[Tensor, ...]:
    """The hidden states, or a tuple with what is beside them, which each layer changes."""
    if not beside:
        return x
    first, *others = beside
    return x, first + 0.1 * x if first.is_floating_point() else first, *others


def build(case: Case, group: dist.ProcessGroup | None = None, *, entry: bool = True) -> list[nn.Module]:
    """The blocks of the whole model, with the same weights in every process; without an entry from the layers on."""
    torch.manual_seed(case.seed)
    model = case.model
    blocks: list[nn.Module] = [Entry(model)]
    blocks += [Layer(model, layer, group) if isinstance(layer, int) else Dense(model, layer) for layer in model.layers]
    head = Head(model)
    if model.tied:
        head.weight = blocks[0].weight
    random = Random(case.seed)
    for _, parameter in nn.Sequential(*blocks[1:]).named_parameters():
        parameter.requires_grad_(random.random() >= model.frozen)
    blocks.append(head)
    return blocks if entry else blocks[1:]


def through(blocks: Sequence[nn.Module], *values: Tensor) -> Tensor:
    """Return the output of blocks that are called one after another."""
    for block in blocks:
        returned = block(*values)
        values = returned if isinstance(returned, tuple) else (returned,)
    (result,) = values
    return result


Microbatch = tuple[Tensor, Tensor]


def batch(case: Case, step: int, shard: int, *, entry: bool = True) -> list[Microbatch]:
    """Inputs and targets of the microbatches that a shard of the data has in a step; hidden states without an entry."""
    data = case.data
    lengths = Random(f"{case.seed} {step if data.varying == 'steps' else 0} {shard if data.uneven else 0}")
    source = torch.Generator().manual_seed(1000 * case.seed + 100 * step + shard)
    found = []
    for _ in range(data.microbatches):
        shape = data.rows, data.sequence + (lengths.randint(0, 3) if data.varying or data.uneven else 0)
        x = torch.randint(models.V, shape, generator=source)
        if case.model.masked:  # rows that end anywhere, perhaps before they begin
            ends = torch.randint(shape[1] + 1, (shape[0], 1), generator=source)
            ends *= int(torch.rand((), generator=source) > 0.2)  # some microbatches are padding alone
            x = x.masked_fill(torch.arange(shape[1]) >= ends, PADDING)
        if not entry:
            x = torch.randn(*shape, case.model.hidden, generator=source)
        target = torch.randint(models.V, shape, generator=source)
        if data.ignored:
            whole = float(torch.rand((), generator=source)) < data.ignored / 2
            target[torch.rand(shape, generator=source) < (1.0 if whole else data.ignored)] = NOTHING
        found.append((x, target))
    found[0][1].view(-1)[0] = 0  # a batch without any target that counts is refused
    return found


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy of the targets that count."""
    return F.cross_entropy(logits.flatten(0, -2), target.flatten(), ignore_index=NOTHING)


def count_tokens(target: Tensor) -> int:
    """Targets that count."""
    return int((target != NOTHING).sum())


def joined(parts: Sequence[Tensor], case: Case) -> Any:
    """A batch as a user gives it: a list of microbatches, or one tensor."""
    return list(parts) if case.data.listed else torch.cat(list(parts))
