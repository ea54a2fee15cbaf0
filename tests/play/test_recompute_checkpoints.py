"""Checkpoints inside blocks: what they run is computed again, its exchanges are not."""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from overlap1f1b.moe import GroupedExperts
from overlap1f1b.play.recompute import _answered
from overlap1f1b.schedule import build_schedule
from overlap1f1b.transport.calls import exchange
from overlap1f1b.transport.exchange import PeerExchange
from overlap1f1b.transport.suspension import Forward, Stack
from tests import models
from tests.engines import COSTS, make
from tests.ranks import over
from tests.tiers import wide

SAVED = {"aten.addmm", "aten.clone", "aten._grouped_mm", "_c10d_functional.all_to_all_single"}


def save_some(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """A policy as torchtitan's: products and exchanges are saved, everything else is computed again."""
    kept = str(operation).rpartition(".")[0] in SAVED
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


plainly: Callable[..., Any] = partial(checkpoint, use_reentrant=False)
selective: Callable[..., Any] = partial(plainly, context_fn=partial(create_selective_checkpoint_contexts, save_some))
KINDS: dict[str, Callable[..., Any]] = {
    "none": lambda function, *args: function(*args),
    "checkpoint": plainly,
    "to its end": partial(plainly, early_stop=False, preserve_rng_state=False),
    "selective": selective,
    "nested": lambda function, *args: plainly(lambda *inner: selective(function, *inner), *args),
}


class Products(TorchDispatchMode):
    """Counts the products of linear layers that are computed."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


class Around(models.Block):
    """Experts in a checkpoint."""

    kind = "none"

    def around(self, experts: nn.Module, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        return KINDS[self.kind](experts, tokens, indices, weights)


class Whole(models.Block):
    """A block with its experts in a checkpoint."""

    kind = "none"

    def forward(self, x: Tensor) -> Tensor:
        return KINDS[self.kind](super().forward, x)


class Own(nn.Module):
    """Exchanges rows there and back by itself, in a checkpoint with another inside."""

    kind, differs, functional = "none", False, False

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.2)
        self.group = group
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + KINDS[self.kind](self.part, x)

    def exchanged(self, rows: Tensor) -> Tensor:
        if not self.functional:
            return exchange(rows, None, None, self.group)
        sizes = [len(rows) // self.group.size()] * self.group.size()
        return all_to_all_single_autograd(rows, sizes, sizes, self.group)  # type: ignore[no-any-return]

    def part(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        rows = self.exchanged(self.first(x).tanh())
        rows = KINDS[self.kind](lambda rows: self.drop(self.second(rows)).tanh().sin(), rows)
        if self.differs and Forward.running().handlers.bring is _answered:  # in the second forward
            rows = rows.cos()
        return self.exchanged(rows).tanh() * self.first(x)


class Functional(Own):
    functional = True


def stepped(mesh: DeviceMesh, kind: type[Any], how: str, **given: Any) -> tuple[dict[str, Tensor], int, int, int]:
    """Return gradients and buffers, and how often rows travelled, experts and linear layers computed in a step."""
    torch.manual_seed(3)
    group, rank, own = mesh.get_group("ep"), mesh.get_local_rank("ep"), issubclass(kind, Own)
    model = nn.Sequential(kind(group)) if own else models.build(group, block=kind, dropout=0.2)
    for index, block in enumerate(model):
        if isinstance(block, kind):
            vars(block).update(given)
            if how == "wrapper":
                model[index] = checkpoint_wrapper(block)
            else:
                block.kind = how
    inputs = torch.randn(12, 8, generator=torch.Generator().manual_seed(rank)) if own else None
    x, y = models.batch(3, seed=rank) if inputs is None else (inputs, inputs.roll(1, 0))
    program = build_schedule("combined_1f1b", microbatches=3)
    loss_fn = F.mse_loss if own else models.loss_fn
    engine = make(model, program, mesh=mesh, loss_fn=loss_fn, costs=COSTS, timeout=30, verify=False)
    for _ in range(2):  # exchanges of a block's own are known from the second step on
        torch.manual_seed(4)
        model.zero_grad()
        with (
            patch.object(PeerExchange, "rows", autospec=True, side_effect=PeerExchange.rows) as travelled,
            patch.object(GroupedExperts, "compute", autospec=True, side_effect=GroupedExperts.compute) as computed,
            Products() as products,
        ):
            engine.step(x, target=y)
    found = {**models.gradients(model), **dict(model.named_buffers())}
    found = {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in found.items()}
    return found, travelled.call_count, computed.call_count, products.count


@pytest.mark.parametrize("kind", [Around, *wide(Whole, Own, Functional)])
@over(2, timeout=120)
def test_rows_travel_once(rank: int, size: int, kind: type[Any]) -> None:
    """Gradients and buffers are those without a checkpoint, dropout included."""
    mesh, problems = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)), list[str]()
    expected, travelled, computed, products = stepped(mesh, kind, "none")
    for how in (*KINDS, "wrapper")[1:]:
        found, *counts, more = stepped(mesh, kind, how)
        if unequal := models.equal(found, expected):
            problems.append(f"{how}: other {unequal}")
        if counts != [travelled, computed * 2]:
            problems.append(f"{how}: rows travelled and experts computed {counts} times, not {[travelled, computed]}")
        if (more > products) != (how == "wrapper" or (how != "selective" and kind is not Around)):
            problems.append(f"{how}: {more} products of linear layers, without a checkpoint {products}")
    assert not problems, problems


class Changing(models.Block):
    """Experts in a checkpoint whose second forward computes something else, if ``differs``."""

    differs = False

    def around(self, experts: nn.Module, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        def part(tokens: Tensor) -> Tensor:
            if self.differs and Forward.running().handlers.bring is _answered:  # in the second forward
                tokens = tokens.cos()
            rows: Tensor = experts(tokens, indices, weights)
            return rows.sin()

        return plainly(part, tokens)


@pytest.mark.parametrize("differs", [False, True])
def test_no_stack_stays(differs: bool) -> None:
    """Of second forwards in backwards. Forwards of the step share a few, which are free again."""
    model, (x, y) = models.build(block=Changing), models.batch(3)
    model[1].differs = differs
    program = build_schedule("combined_1f1b", microbatches=3)
    engine = make(model, program, costs=COSTS, verify=False, overlap=3)
    for _ in range(2):
        with pytest.raises(ValueError, match="computes something else") if differs else nullcontext():
            engine.step(x, target=y)
    gc.collect()
    assert [s for s in gc.get_objects() if isinstance(s, Stack) and s] == []


@over(2)
def test_a_part_that_does_not_repeat_itself_is_refused(rank: int, size: int) -> None:
    with pytest.raises((ValueError, RuntimeError)) as caught:
        stepped(init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)), Own, "checkpoint", differs=True)
    text = "\n".join([str(caught.value), *caught.value.__notes__])
    assert "block 0 (Own) computes something else when a part of it is computed again" in text, text
