"""Parameters that several stages hold as one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b.engine import Engine
from overlap1f1b.plan import NodeCosts
from overlap1f1b.schedule import build_schedule
from tests import models
from tests.ranks import Ranks

COSTS = NodeCosts.uniform(attention=3, experts=4, dispatch=5, counts=0.4, aggregate=0.2, dense=1, reduce=2, send=1)
MICROBATCHES = 4


class Stage(nn.Module):
    """A stage with a parameter that another has, too."""

    def __init__(self, blocks: list[nn.Module], tied: dict[str, nn.Parameter]) -> None:
        super().__init__()
        self.held = nn.ModuleList(blocks)
        self.__dict__ |= {"blocks": blocks, "tied": tied}


def build(held: list[int], stages: int, name: str = "weight") -> dict[int, Stage]:
    """Stages of a model whose head is tied to its embedding, each with a copy of the weight."""
    blocks = list(models.build(tied=True))
    embedding, head = blocks[0], blocks[-1]
    assert isinstance(embedding, nn.Embedding)
    head.weight = nn.Parameter(embedding.weight.detach().clone())
    cut = [blocks[:2], blocks[2:]] if stages == 2 else [blocks[:1], blocks[1:3], blocks[3:4], blocks[4:]]
    ends = {0: {name: embedding.weight}, stages - 1: {"weight": head.weight}}
    return {number: Stage(cut[number], ends.get(number, {})) for number in held}


def reference(steps: int) -> tuple[Tensor, float]:
    """The tied weight's gradient in one process after some steps, and the norm over the model."""
    model = models.build(tied=True)
    for _ in range(steps):
        models.plain_gradients(model, *models.batch(MICROBATCHES), MICROBATCHES)
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return model.get_parameter("0.weight").grad.clone(), float(norm)


def _summed(rank: int, size: int, schedule: str, chunks: int) -> None:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("pp",))
    program = build_schedule(schedule, ranks=size, microbatches=MICROBATCHES, chunks=chunks)
    held = sorted({stage for _, stage in program.placement.places(rank)})
    stages = build(held, program.placement.stages)
    engine = Engine(stages, program, mesh=mesh, loss_fn=models.loss_fn, costs=COSTS, timeout=30)
    inputs, target = models.batch(MICROBATCHES)
    for steps in (1, 2):
        engine.step(inputs, target=target)
        expected, norm = reference(steps)
        for stage in stages.values():
            for parameter in stage.tied.values():
                torch.testing.assert_close(parameter.grad, expected)
    assert float(engine.clip_gradients(1e9)) == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("1f1b", 1), ("interleaved_1f1b", 2), ("dualpipev", 2), ("dualpipe", 1)]
)
def test_gradients_are_summed_over_stages(ranks2: Ranks, schedule: str, chunks: int) -> None:
    ranks2.run(_summed, schedule, chunks)


def test_two_stages_of_one_rank() -> None:
    program = build_schedule("interleaved_1f1b", ranks=1, microbatches=MICROBATCHES, chunks=2)
    stages = build([0, 1], 2)
    inputs, target = models.batch(MICROBATCHES)
    Engine(stages, program, loss_fn=models.loss_fn, costs=COSTS).step(inputs, target=target)
    expected, _ = reference(1)
    for stage in stages.values():
        torch.testing.assert_close(stage.tied["weight"].grad, expected)


def test_frozen_weights_get_no_gradient() -> None:
    program = build_schedule("interleaved_1f1b", ranks=1, microbatches=MICROBATCHES, chunks=2)
    stages = build([0, 1], 2)
    tied = [stage.tied["weight"].requires_grad_(False) for stage in stages.values()]
    inputs, target = models.batch(MICROBATCHES)
    Engine(stages, program, loss_fn=models.loss_fn, costs=COSTS).step(inputs, target=target)
    assert all(parameter.grad is None for parameter in tied), "weight decay would change frozen weights"


def test_not_without_reductions() -> None:
    program = build_schedule("interleaved_1f1b", ranks=1, microbatches=MICROBATCHES, chunks=2)
    stages = build([0, 1], 2)
    inputs, target = models.batch(MICROBATCHES)
    Engine(stages, program, loss_fn=models.loss_fn, costs=COSTS, reduce=False).step(inputs, target=target)
    expected, _ = reference(1)
    first, last = (stage.tied["weight"].grad for stage in stages.values())
    torch.testing.assert_close(first + last, expected)


def test_another_shape_is_refused() -> None:
    program = build_schedule("interleaved_1f1b", ranks=1, microbatches=MICROBATCHES, chunks=2)
    stages = build([0, 1], 2)
    stages[1].tied["weight"] = nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match=r"^weight is tied over stages with shapes .*; allowed: one shape"):
        Engine(stages, program, loss_fn=models.loss_fn, costs=COSTS)
