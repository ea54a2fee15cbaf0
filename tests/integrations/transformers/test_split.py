"""Models of transformers under the engine, against their own forward and backward in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("transformers")

from overlap1f1b.engine import Engine
from overlap1f1b.integrations.transformers import SplitModel, split_model
from overlap1f1b.moe import Experts
from overlap1f1b.plan import NodeCosts, Overlap
from overlap1f1b.schedule import Program, build_schedule
from tests.integrations.transformers import tiny
from tests.ranks import Ranks

COSTS = NodeCosts.uniform(attention=3, experts=4, dispatch=5, counts=0.4, aggregate=0.2, dense=1, reduce=2, send=1)
PROGRAMS = {"sequential": 1, "combined_1f1b": 1, "dualpipev": 1}
OVERLAPS: list[Overlap] = ["pairs", 3]
MICROBATCHES = 4


def mine(stages: SplitModel, expected: dict[str, Tensor], name: str) -> Tensor:
    """This rank's part of a gradient of the whole model."""
    owner = dict(named_modules(stages)).get(name.rpartition(".")[0])
    while owner is not None and not isinstance(owner, Experts):
        name_ = name.rpartition(".")[0]
        owner = None if "." not in name_ else None
    if not isinstance(owner, Experts):
        return expected[name]
    return expected[name].chunk(owner.exchange.ranks)[owner.exchange.rank]


def named_modules(stages: SplitModel) -> Any:
    return (pair for stage in stages.values() for pair in stage.named_modules())


def problems_of(stages: SplitModel, expected: dict[str, Tensor], limit: float) -> list[str]:
    """Where this rank's gradients differ from those of one process."""
    found = dict(stages.named_parameters())
    problems = [f"{name} is not a parameter of the model" for name in found.keys() - expected.keys()]
    for name in found.keys() & expected.keys():
        grad = found[name].grad
        grad = torch.zeros_like(found[name]) if grad is None else grad
        error = tiny.difference(grad, mine(stages, expected, name))
        if error > limit:
            problems.append(f"{name} differs by {error:.1e} from one process")
    return problems


@pytest.mark.parametrize("name", tiny.MODELS)
@pytest.mark.parametrize("schedule", PROGRAMS)
def test_one_rank_is_bit_equal(name: str, schedule: str) -> None:
    tokens, labels = tiny.batch(8)
    options = {"output_router_logits": True} if name != "deepseek_v3" else {}
    losses, expected = tiny.own_gradients(tiny.build(name, **options), {"input_ids": tokens}, labels, MICROBATCHES)
    program = build_schedule(schedule, ranks=1, microbatches=MICROBATCHES)
    for overlap in OVERLAPS:
        stages = split_model(tiny.build(name, **options), program)
        engine = Engine(stages, program, loss_fn=stages.loss_fn, overlap=overlap, costs=COSTS)
        result = engine.step(tokens, target=labels)
        assert list(result.losses) == losses
        limit = 0.0 if len(stages) == 1 else 1e-6  # copies of stages: sums over router logits have another order
        assert problems_of(stages, expected, limit) == []


def _compare(rank: int, size: int, name: str, pp: int, ep: int, double: bool, options: dict[str, Any]) -> list[str]:
    mesh = init_device_mesh("cpu", (pp, ep), mesh_dim_names=("pp", "ep"))
    ep_rank = mesh["ep"].get_local_rank()
    shards = [tiny.batch(8, seed=seed) for seed in range(ep)]
    whole = tiny.build(name, double=double, **options)
    every = [tiny.own_gradients(whole, {"input_ids": x}, y, MICROBATCHES, 1 / ep) for x, y in shards]
    expected, limit = every[-1][1], 1e-12 if double else 1e-5
    tokens, labels = shards[ep_rank]
    problems = []
    for schedule in PROGRAMS:
        program = build_schedule(schedule, ranks=pp, microbatches=MICROBATCHES)
        for overlap in OVERLAPS:
            stages = split_model(tiny.build(name, double=double, **options), program, mesh)
            engine = Engine(
                stages, program, mesh=mesh, loss_fn=stages.loss_fn, overlap=overlap, costs=COSTS, timeout=30
            )
            result = engine.step(tokens, target=labels)
            found = problems_of(stages, expected, limit)
            for loss, own in zip(result.losses, every[ep_rank][0], strict=bool(result.losses)):
                if tiny.difference(loss, own) > limit:
                    found.append(f"loss {float(loss)} instead of {float(own)}")
            problems += [f"{schedule} {overlap}: {problem}" for problem in found]
    return problems


AUXILIARY = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
CASES = [
    ("mixtral", {**AUXILIARY, "tie_word_embeddings": True}),
    ("qwen3_moe", AUXILIARY),
    ("deepseek_v3", {}),
    ("gpt_oss", AUXILIARY),
]


@pytest.mark.parametrize(("pp", "ep"), [(2, 1), (1, 2)])
@pytest.mark.parametrize(("name", "options"), CASES, ids=[name for name, _ in CASES])
def test_two_ranks(ranks2: Ranks, name: str, options: dict[str, Any], pp: int, ep: int) -> None:
    assert ranks2.run(_compare, name, pp, ep, False, options) == [[]] * 2


@pytest.mark.parametrize(("name", "options"), CASES, ids=[name for name, _ in CASES])
def test_two_stages_and_two_expert_ranks(ranks4: Ranks, name: str, options: dict[str, Any]) -> None:
    assert ranks4.run(_compare, name, 2, 2, True, options) == [[]] * 4
