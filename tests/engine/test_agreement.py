"""Ranks that differ in what has to be equal are told so, with both values, before anything wrong is trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b.engine import Engine, Stage
from overlap1f1b.engine.agreement import calls, options, structure, values
from overlap1f1b.engine.failures import LostRankError
from overlap1f1b.engine.mesh import Mesh
from overlap1f1b.plan import NodeCosts
from overlap1f1b.schedule import build_schedule
from tests import models
from tests.ranks import Ranks

LIMIT = 20.0
OPTIONS: dict[str, Any] = {
    "overlap": "serial",
    "recompute": "block",
    "capacity": 4.0,
    "dynamic_shapes": True,
    "count_tokens": lambda y: y.numel(),
    "reduce": False,
    "costs": NodeCosts(),
    "weights": [1.0, 1.0, 1.0, 1.0, 2.0],
    "check_parameters": False,
}

OTHERS = ("program", "microbatches", "seed", "top_k", "frozen", "layers", "loss_scale")


def one_choice(tokens: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights, indices = logits.softmax(-1).topk(1, -1)
    return indices, weights


def _differing(rank: int, size: int, what: str, culprit: int) -> str:
    """What a rank says where one of four has another option, program, model or call."""
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("pp", "ep"))
    mine = rank == culprit
    given: dict[str, Any] = {what: OPTIONS[what]} if mine and what in OPTIONS else {}
    schedule = "1f1b" if mine and what == "program" else "combined_1f1b"
    count = 6 if mine and what == "microbatches" else 4
    program = build_schedule(schedule, ranks=2, microbatches=count)
    choose = {"choose": (one_choice,)} if mine and what == "top_k" else {"choose": (models.top_k,)}
    model = models.build(mesh.get_group("ep"), layers=4 if mine and what == "layers" else 2, **choose)
    with torch.no_grad():
        if mine and what == "seed":
            for block in model:
                block.get_parameter("mix.weight" if isinstance(block, models.Block) else next(_names(block))).add_(1e-3)
    if mine and what == "frozen":
        for parameter in model.parameters():
            parameter.requires_grad_(False)
    inputs, target = models.batch(12, seed=rank)
    try:
        engine = Engine(model, program, mesh=mesh, loss_fn=models.loss_fn, timeout=LIMIT, **given)
        engine.step(inputs, target=target, loss_scale=2.0 if mine and what == "loss_scale" else 1.0)
    except (ValueError, LostRankError) as error:
        return "\n".join([str(error), *error.__notes__])
    return "it trained"


def _names(block: nn.Module) -> Any:
    return (name for name, _ in block.named_parameters())


@pytest.mark.parametrize("culprit", [0, 3])
@pytest.mark.parametrize("what", [*OPTIONS, *OTHERS])
def test_every_rank_says_which_rank_has_which_value(ranks4: Ranks, what: str, culprit: int) -> None:
    name = f"rank pp {culprit // 2}, ep {culprit % 2}"
    for said in ranks4.run(_differing, what, culprit, timeout=3 * LIMIT):
        assert name in said, said
        assert "; allowed: the same on all ranks" in said, said


def test_facts_of_equal_models_are_equal_and_change_with_any_bit() -> None:
    first, second = (Stage(models.build(), number=1) for _ in range(2))
    alone = Mesh(None)
    assert structure({1: first}) == structure({1: second})
    facts = values({1: first}, {}, alone)
    assert facts == values({1: second}, {}, alone)
    weight = second.blocks[0].get_parameter("weight")
    with torch.no_grad():
        weight[3, 2] = torch.nextafter(weight[3, 2], torch.tensor(1.0))
    changed = values({1: second}, {}, alone)
    assert [name for name in facts if facts[name] != changed[name]] == [
        "the sum of bits of parameter weight of block 0 (Embedding) of stage 1"
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.uint8])
def test_values_of_any_dtype_have_a_sum(dtype: torch.dtype) -> None:
    block = nn.Linear(3, 3, bias=False)
    block.weight = nn.Parameter(torch.arange(9).view(3, 3).to(dtype), requires_grad=False)
    facts = values({0: Stage([block])}, {"name": block.weight}, Mesh(None))
    own, tied = facts.values()
    assert own == tied != "0"


def test_options_of_another_order_of_actions_differ() -> None:
    one, other = (build_schedule("combined_1f1b", microbatches=4, extra_warmup=w) for w in (0, 1))
    assert options(one)["program"] != options(other)["program"]
    assert options(one, capacity=None) == {"program": options(one)["program"], "capacity": None}


def test_calls_are_noted_in_the_first_step() -> None:
    data = models.batch(2)
    engine = Engine(models.build(), build_schedule("sequential", microbatches=2), loss_fn=models.loss_fn)
    assert calls(engine.stages) == {}
    engine.step(data[0], target=data[1])
    assert calls(engine.stages) == {
        f"call 0 of experts in block {block} (Block) of stage 0": "2 experts a token, hidden 20, float32"
        for block in (1, 3)
    }
