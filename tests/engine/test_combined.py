"""combined_forward_backward_step, used without an engine."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b.engine import Stage, combined_forward_backward_step
from overlap1f1b.moe.exchange import build_exchange
from overlap1f1b.plan import Overlap
from tests import models
from tests.ranks import Ranks

OVERLAPS: list[Overlap] = ["serial", "pairs", 1, 2]


def run(stage: Stage, model: torch.nn.Module, microbatches: int, overlap: Overlap, seed: int = 5) -> list[float]:
    inputs, target = models.batch(microbatches, seed=seed)
    losses, previous = [], None
    for index, (x, y) in enumerate(zip(inputs.chunk(microbatches), target.chunk(microbatches), strict=True)):
        current = stage.microbatch(x, y, index=index, loss_fn=models.loss_fn, loss_scale=1 / microbatches)
        loss, _ = combined_forward_backward_step(current, previous, overlap=overlap, timeout=20)
        assert loss is not None
        losses.append(float(loss))
        previous = current
    combined_forward_backward_step(None, previous, overlap=overlap, timeout=20)
    return losses


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_a_loop_of_combined_steps_equals_plain_autograd(overlap: Overlap, microbatches: int) -> None:
    losses, expected = models.plain_gradients(models.build(), *models.batch(microbatches), microbatches)
    model = models.build()
    assert run(Stage(model), model, microbatches, overlap) == [float(x) for x in losses]
    assert not models.equal(models.gradients(model), expected)


def test_output_grad_and_input_grad_cross_a_boundary() -> None:
    model = models.build()
    stage = Stage(list(model)[1:3])
    x = torch.randn(2, 5, models.H, requires_grad=True)
    out = torch.nn.Sequential(*list(model)[1:3])(x)
    grad = torch.randn_like(out)
    out.backward(grad)
    expected = models.gradients(model)
    model.zero_grad()
    microbatch = stage.microbatch(x.detach().requires_grad_())
    output, _ = combined_forward_backward_step(microbatch, None)
    assert output is not None
    assert torch.equal(output, out)
    _, input_grad = combined_forward_backward_step(None, microbatch, output_grad=grad)
    assert input_grad is not None
    assert x.grad is not None
    assert torch.equal(input_grad, x.grad)
    assert not models.equal(models.gradients(model), expected)


def _two(rank: int, size: int) -> list[str]:
    group, reference, problems = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)).get_group("ep"), None, []
    for overlap in OVERLAPS:
        model = models.build(group)
        run(Stage(model, build_exchange(group)), model, 4, overlap, seed=rank)
        found = models.gradients(model)
        reference = reference or found
        problems += models.equal(found, reference)
    return problems


def test_two_ranks_are_bit_equal(ranks2: Ranks) -> None:
    assert ranks2.run(_two) == [[], []]


def test_bad_input_is_named() -> None:
    stage = Stage(models.build())
    x, y = models.batch(1)
    fresh = stage.microbatch(x, y, loss_fn=models.loss_fn)
    with pytest.raises(ValueError, match="neither a forward nor a backward"):
        combined_forward_backward_step(None, None)
    with pytest.raises(ValueError, match="given twice"):
        combined_forward_backward_step(fresh, fresh)
    with pytest.raises(ValueError, match="not between forward and backward"):
        combined_forward_backward_step(None, fresh)
    done = Stage(models.build()).microbatch(x, y, loss_fn=models.loss_fn)
    combined_forward_backward_step(done, None)
    with pytest.raises(ValueError, match="different stages"):
        combined_forward_backward_step(fresh, done)
    silent = stage.microbatch(x)
    combined_forward_backward_step(silent, None)
    with pytest.raises(ValueError, match="neither output_grad nor loss_fn"):
        combined_forward_backward_step(None, silent)
