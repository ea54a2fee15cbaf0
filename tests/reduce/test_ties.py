"""Parameters that several stages hold as one."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b.schedule import build_schedule
from tests import models
from tests.engines import COSTS, make
from tests.ranks import over
from tests.tiers import wide

MICROBATCHES = 4
HERE = build_schedule("interleaved_1f1b", ranks=1, microbatches=MICROBATCHES, chunks=2)
"""Two stages of one rank."""


class Stage(nn.Module):
    """A stage with a parameter that another has, too."""

    def __init__(self, blocks: list[nn.Module], tied: dict[str, nn.Parameter]) -> None:
        super().__init__()
        self.blocks, self.tied = nn.ModuleList(blocks), tied


def build(held: list[int], stages: int, name: str = "weight", *, copy: bool = True) -> dict[int, Stage]:
    """Stages of a model whose head is tied to its embedding, each with a copy of the weight unless both are held."""
    blocks = list(models.build(tied=True))
    embedding, head = blocks[0], blocks[-1]
    if copy or not {0, stages - 1} <= set(held):
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


@pytest.mark.parametrize("copy", [True, *wide(False)])
@pytest.mark.parametrize(
    ("schedule", "chunks", "along"),
    [("1f1b", 1, "pp"), *wide(("interleaved_1f1b", 2, "dp"), ("dualpipev", 2, "pp"), ("dualpipe", 1, "pp"))],
)
@over(2)
def test_gradients_are_summed_over_stages(
    rank: int, size: int, schedule: str, chunks: int, along: str, copy: bool
) -> None:
    """Over stages of two ranks, and of one, which have a copy each or one object."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=(along,))
    ranks = size if along == "pp" else 1
    program = build_schedule(schedule, ranks=ranks, microbatches=MICROBATCHES, chunks=chunks)
    held = sorted({stage for _, stage in program.placement.places(rank % ranks)})
    stages = build(held, program.placement.stages, copy=copy)
    engine = make(stages, program, mesh=mesh, costs=COSTS, timeout=30)
    assert len(list(engine.parameters())) == len(set(engine.parameters()))
    inputs, target = models.batch(MICROBATCHES)
    for steps in (1, 2):
        engine.step(inputs, target=target)
        expected, norm = reference(steps)
        for stage in stages.values():
            for parameter in stage.tied.values():
                torch.testing.assert_close(parameter.grad, expected)
    assert float(engine.clip_gradients(1e9)) == pytest.approx(norm, rel=1e-5)


@over(2)
def test_one_object_that_is_not_named_as_tied_is_refused(rank: int, size: int) -> None:
    """On one rank alone, or on both by one of the stages."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    unnamed = build([0, 1], 2, copy=False)
    unnamed[1].tied.clear()
    for stages, why in (
        (build([0, 1], 2, copy=rank > 0), r"parameter weight of .* of stage 1"),
        (unnamed, r"^parameter weight of a \w+ belongs to two stages; .* attribute tied of both"),
    ):
        with pytest.raises(ValueError, match=why):
            make(stages, HERE, mesh=mesh, costs=COSTS, timeout=30)


def test_two_names_and_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^a parameter is tied as embedding and as weight; allowed: one name"):
        make(build([0, 1], 2, "embedding", copy=False), HERE, costs=COSTS)
    stages = build([0, 1], 2)
    stages[1].tied["weight"] = nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match=r"^weight is tied over stages with shapes .*; allowed: one shape"):
        make(stages, HERE, costs=COSTS)


def test_frozen_weights_get_no_gradient() -> None:
    stages = build([0, 1], 2)
    tied = [stage.tied["weight"].requires_grad_(False) for stage in stages.values()]
    make(stages, HERE, costs=COSTS).step(*models.batch(MICROBATCHES))
    assert all(parameter.grad is None for parameter in tied), "weight decay would change frozen weights"


def test_not_without_reductions() -> None:
    stages = build([0, 1], 2)
    make(stages, HERE, costs=COSTS, reduce=False).step(*models.batch(MICROBATCHES))
    expected, _ = reference(1)
    first, last = (stage.tied["weight"].grad for stage in stages.values())
    torch.testing.assert_close(first + last, expected)
