"""What the engine knows of a stage's blocks, and changes in them."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from overlap1f1b.cut.blocks import blocks_of_stage, refuse_wrappers
from overlap1f1b.engine import Stage, blocks_of
from overlap1f1b.play.install import Installation
from tests import models


def test_modules_are_as_they_were_after_a_step_that_fails_too() -> None:
    model = models.build()
    stage, before = Stage(model), [dict(module.__dict__) for module in model.modules()]

    def fail() -> None:
        with Installation(stage).on_modules(0.5):
            assert [dict(module.__dict__) for module in model.modules()] != before
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [dict(module.__dict__) for module in model.modules()] == before


@pytest.mark.parametrize("change", ["subclass", "frozen", "own forward"])
def test_only_plain_linear_layers_with_a_trained_weight_are_split(change: str) -> None:
    class Other(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input)

    linear = Other(2, 2) if change == "subclass" else nn.Linear(2, 2)
    if change == "frozen":
        linear.weight.requires_grad_(False)
    elif change == "own forward":
        linear.forward = lambda input: input  # type: ignore[method-assign]
    assert Stage([linear]).inside[0].linears == []
    assert Stage([nn.Linear(2, 2)]).shape[0].split


def test_blocks_of_a_model() -> None:
    a, b = nn.Linear(2, 2), nn.Tanh()
    held = nn.Module()
    held.__dict__["blocks"] = [a, b]
    assert blocks_of(nn.Sequential(a, b, a)) == [a, b, a]
    assert blocks_of([a, b]) == blocks_of(held) == [a, b]
    with pytest.raises(ValueError, match=r"a model of type Linear; allowed: an nn\.Sequential or a list of blocks"):
        blocks_of(a)
    wrapper = nn.Linear(2, 2)
    wrapper.module = nn.Sequential(a)  # as of DistributedDataParallel and Fabric
    with pytest.raises(
        ValueError, match="a list of blocks, unwrapped: let accelerate or Fabric prepare optimizer and "
    ):
        blocks_of(wrapper)
    with pytest.raises(ValueError, match="a stage without blocks"):
        Stage([])


class Part(nn.Module):
    """A stage in the form that comes to mind first."""

    def __init__(self, *blocks: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.tied = nn.ParameterDict({"weight": blocks[0].weight})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_blocks_of_a_stage() -> None:
    a, b = nn.Linear(2, 2), nn.Tanh()
    assert blocks_of_stage(Part(a, b)) == blocks_of(nn.ModuleList([a, b])) == blocks_of_stage([a, b]) == [a, b]
    shifted, hooked = Part(a, b), Part(a, b)
    shifted.register_buffer("shift", torch.zeros(2))
    hooked.register_forward_hook(lambda *_: None)
    for stage, what in ((shifted, "shift beside its blocks"), (hooked, "forward hooks of its own")):
        with pytest.raises(ValueError, match=f"^a stage of type Part with {what}, which no step would call; allowed:"):
            blocks_of_stage(stage)
    with pytest.raises(ValueError, match=r"a model of type Part; allowed: an nn\.Sequential or a list"):
        blocks_of(Part(a, b))


def test_wrappers_that_sum_gradients_are_refused() -> None:
    """DistributedDataParallel sums in each backward what the engine has not added to the gradients yet."""
    wrapped = nn.Sequential(nn.DataParallel(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match=r"^block 1 \(Sequential\) holds a DataParallel; allowed: its module"):
        Stage([nn.Tanh(), wrapped])
    sharded = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(sharded)
    sharded._modules["_fsdp_wrapped_module"] = nn.Linear(2, 2)  # its attributes are those of this module
    with pytest.raises(ValueError, match=r"^block 0 holds a FullyShardedDataParallel; allowed: .*fully_shard"):
        refuse_wrappers([sharded], ["block 0"])


@pytest.mark.parametrize("own", models.OWN_CALLS)
def test_a_sequential_whose_call_does_more_than_call_its_blocks_is_refused(own: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    handle = models.OWN_CALLS[own](model)
    try:
        with pytest.raises(ValueError, match=rf"^a model of type Sequential with {own}; allowed: .*\[model\] as one"):
            blocks_of(model)
        assert blocks_of([model]) == [model]
        assert len(blocks_of(list(model))) == 2
    finally:
        if handle is not None:
            handle.remove()


def test_global_hooks_are_no_obstacle() -> None:
    """They run for the blocks, and on one rank alone must not change how a model is cut."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    with FlopCounterMode(display=False):
        assert blocks_of(model) == list(model)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"exchange": "gloo"}, "exchange='gloo'; allowed: Exchange or None"),
        ({"recompute": "all"}, "recompute='all'; allowed: none, experts, attention, or block"),
        ({"device": "cpu"}, "device='cpu'; allowed: torch.device or None"),
        ({"reduce_dense": "no"}, "reduce_dense='no'; allowed: True or False"),
    ],
)
def test_values_of_another_kind(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Stage([nn.Linear(2, 2)], **given)
