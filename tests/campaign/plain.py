"""The plain loop: the whole model in one process, microbatch after microbatch."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlap1f1b.moe import Router, set_auxiliary_scale
from tests.campaign.build import Microbatch, batch, build, count_tokens, loss_fn, through
from tests.campaign.compare import Values, values_of
from tests.campaign.draw import Case

T = TypeVar("T")


class Expected(NamedTuple):
    """The values that a step must give."""

    losses: list[list[Tensor]]  # of each shard's microbatches
    before: list[list[Tensor]]  # of an evaluation before the step
    values: Values  # gradients, their norm, and the parameters after the optimizer, by name


class Parts(NamedTuple):
    """The values of a rank that does not sum gradients: of one shard, but for experts of all shards."""

    losses: list[Tensor]
    input_grads: list[Tensor | None]
    values: Values


def on_first_rank(make: Callable[[], T]) -> T:
    """Return on all ranks what the first rank makes."""
    made: list[Any] = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    return made[0]


def autocast(case: Case) -> AbstractContextManager[Any]:
    """Return the case's autocast."""
    return torch.autocast("cpu", torch.bfloat16) if case.autocast else nullcontext()


def optimizer_of(case: Case, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer whose state matters, and which does not blow up rounding as Adam does."""
    return torch.optim.SGD(parameters, lr=0.1 / case.loss_scale, momentum=0.9)


def named(blocks: Sequence[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """Parameters by their names in the whole model, tied ones under each."""
    return list(nn.Sequential(*blocks).named_parameters(remove_duplicate=False))


def train(case: Case) -> list[Expected]:
    """The steps of a case, over the data of all shards."""
    blocks = build(case)
    model = nn.Sequential(*blocks)
    optimizer = optimizer_of(case, model.parameters())
    expected = []
    for step, update in enumerate(case.updates):
        shards = case.layout(step).dp * case.layout(step).ep
        data = [batch(case, step, shard) for shard in range(shards)]
        before = [evaluate(case, blocks, mine) for mine in data] if case.evaluated else []
        total = sum(count_tokens(y) for mine in data for _, y in mine)
        set_auxiliary_scale(model, case.loss_scale * (1 / (case.data.microbatches * shards)))
        losses = []
        for mine in data:
            losses.append([])
            for x, y in mine:
                weight = count_tokens(y) / total if case.data.ignored else 1 / (len(mine) * shards)
                with autocast(case):
                    logits = through(blocks, x)
                    loss = loss_fn(logits, y) if count_tokens(y) else 0.0 * logits.sum()
                (loss * (weight * case.loss_scale)).backward()
                losses[-1].append(loss.detach())
        values = values_of(named(blocks), f"step {step} gradient ", grad=True)
        if update:
            if case.max_norm:
                values[f"step {step} norm"] = nn.utils.clip_grad_norm_(model.parameters(), case.max_norm)
            optimizer.step()
            optimizer.zero_grad()
            values |= values_of(named(blocks), f"step {step} ", grad=False) | balanced(case, blocks, step)
        expected.append(Expected(losses, before, values))
    return expected


def balanced(case: Case, blocks: Sequence[nn.Module], step: int) -> Values:
    """Let the routers' biases follow their loads, where a case wants it; return them by name."""
    if not case.model.biased:
        return {}
    found = {}
    for name, module in nn.Sequential(*blocks).named_modules():
        if isinstance(module, Router):
            with warnings.catch_warnings(action="ignore"):  # the plain loop has the choices of all ranks
                module.update_correction_bias(0.02)
            found[f"step {step} {name}.correction_bias"] = module.correction_bias.clone()
    return found


@torch.no_grad()
def evaluate(case: Case, blocks: Sequence[nn.Module], data: Sequence[Microbatch]) -> list[Tensor]:
    """Losses of a shard's microbatches."""
    with autocast(case):
        return [loss_fn(through(blocks, x), y) if count_tokens(y) else torch.zeros(()) for x, y in data]


def walk(case: Case, data: Sequence[Sequence[Microbatch]], *, entry: bool, scale: float = 1.0) -> list[Parts]:
    """One step over the data of each shard, gradients of the dense parameters apart."""
    blocks = build(case, entry=entry)
    set_auxiliary_scale(nn.Sequential(*blocks), scale)
    parts = []
    for mine in data:
        losses, leaves = [], []
        for x, y in mine:
            leaves.append(x.clone().requires_grad_(x.is_floating_point()))
            loss = loss_fn(through(blocks, leaves[-1]), y)
            (loss * scale).backward()
            losses.append(loss.detach())
        values = values_of(named(blocks), "", grad=True)
        parts.append(Parts(losses, [leaf.grad for leaf in leaves], values))
        for _, parameter in named(blocks):
            parameter.grad = None
    for name in parts[0].values:
        if ".experts." in name:
            whole = torch.stack([part.values[name] for part in parts]).sum(0)
            for part in parts:
                part.values[name] = whole
    return parts
