"""combined_forward_backward_step, used without an engine."""

import itertools
import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b.engine import Microbatch, Stage, combined_forward_backward_step
from overlap1f1b.moe import Router, RouterConfig, set_auxiliary_scale
from overlap1f1b.plan import Overlap, Recompute
from overlap1f1b.transport.exchange import build_exchange
from tests import models
from tests.pauses import pauses
from tests.ranks import over

OVERLAPS: list[Overlap] = ["serial", "pairs", 1, 2]
RECOMPUTES: list[Recompute] = ["none", "experts", "attention", "block"]


class Balanced(models.Block):
    """Norm, router with auxiliary losses, experts, ``expert_calls`` times."""

    def __init__(self, group: Any = None, **options: Any) -> None:
        super().__init__(group, **options)
        config = RouterConfig(experts=models.E, top_k=models.K, aux_coefficient=0.5, z_coefficient=0.2)
        self.gates = torch.nn.ModuleList(Router(models.H, config) for _ in self.experts)

    def forward(self, x: Tensor) -> Tensor:
        for router, experts, post in zip(self.gates, self.experts, self.post, strict=True):
            tokens = self.norm(x).reshape(-1, models.H)
            x = x + post(experts(tokens, *router(tokens))).view_as(x)
        return x


def run(stage: Stage, microbatches: int, overlap: Overlap, seed: int = 5) -> list[float]:
    inputs, target = models.batch(microbatches, seed=seed)
    losses, previous = [], None
    for index, (x, y) in enumerate(zip(inputs.chunk(microbatches), target.chunk(microbatches), strict=True)):
        current = Microbatch(stage, x, y, index=index, loss_fn=models.loss_fn, loss_grad=1 / microbatches)
        loss, _ = combined_forward_backward_step(current, previous, overlap=overlap, timeout=20)
        losses.append(float(loss))
        previous = current
    combined_forward_backward_step(None, previous, overlap=overlap, timeout=20)
    return losses


def test_gradients_in_inference_mode_are_refused() -> None:
    microbatch = Microbatch(Stage(models.build()), *models.batch(1), loss_fn=models.loss_fn)
    with torch.inference_mode(), pytest.raises(ValueError, match=r"^a step with gradients under torch\.inference_mode"):
        combined_forward_backward_step(microbatch, None)


@pytest.mark.parametrize(("overlap", "microbatches"), [("serial", 1), ("serial", 5), ("pairs", 2), (1, 5), (2, 5)])
def test_a_loop_of_combined_steps_equals_plain_autograd(overlap: Overlap, microbatches: int) -> None:
    losses, expected = models.plain_gradients(models.build(), *models.batch(microbatches), microbatches)
    model = models.build()
    assert run(Stage(model), microbatches, overlap) == [float(x) for x in losses]
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
    microbatch = Microbatch(stage, x.detach().requires_grad_())
    output, _ = combined_forward_backward_step(microbatch, None)
    assert torch.equal(output, out)
    _, input_grad = combined_forward_backward_step(None, microbatch, output_grad=grad)
    assert torch.equal(input_grad, x.grad)
    assert not models.equal(models.gradients(model), expected)


@pytest.mark.parametrize(("overlap", "split"), [("serial", True), ("pairs", False), (1, True), (2, False), (2, True)])
def test_two_stages_and_weights_apart(overlap: Overlap, split: bool) -> None:
    """Microbatch 1 enters the first stage while microbatch 0 leaves the second one."""
    losses, expected = models.plain_gradients(models.build(), *models.batch(2), 2)
    model = models.build()
    exchange = build_exchange(None)
    first, second = (Stage(b, exchange, number=i) for i, b in enumerate((list(model)[:2], list(model)[2:])))
    (x0, x1), (y0, y1) = (part.chunk(2) for part in models.batch(2))

    def step(forward: Microbatch | None, backward: Microbatch | None, grad: Tensor | None = None) -> Any:
        result = combined_forward_backward_step(forward, backward, output_grad=grad, overlap=overlap, split=split)
        if backward is not None and split:
            assert backward.queues
            backward.accumulate_weights()
        return result

    def next_stage(hidden: Tensor, target: Tensor, index: int) -> Microbatch:
        hidden = hidden.requires_grad_()
        return Microbatch(second, hidden, target, index=index, loss_fn=models.loss_fn, loss_grad=0.5)

    a0, a1 = Microbatch(first, x0, index=0), Microbatch(first, x1, index=1)
    b0 = next_stage(step(a0, None)[0], y0, 0)
    found = [step(b0, None)[0]]
    hidden, grad = step(a1, b0)
    b1 = next_stage(hidden, y1, 1)
    found.append(step(b1, a0, grad)[0])
    _, grad = step(None, b1)
    step(None, a1, grad)
    assert [float(x) for x in found] == [float(x) for x in losses]
    assert not models.equal(models.gradients(model), expected)


def test_nothing_may_be_left_for_later() -> None:
    for split in (False, True):
        norm = torch.nn.LayerNorm(4)
        microbatch = Microbatch(Stage([norm]), torch.randn(2, 4), loss_fn=torch.sum)
        combined_forward_backward_step(microbatch, None)
        combined_forward_backward_step(None, microbatch, split=split)
        microbatch.accumulate_weights()
        assert norm.bias.grad.tolist() == [2.0] * 4


@pytest.mark.parametrize("recompute", ["none", "attention"])
def test_a_gradient_that_is_given_goes_before_that_of_the_loss(recompute: Recompute) -> None:
    linear = torch.nn.Linear(4, 4)
    microbatch = Microbatch(Stage([linear], recompute=recompute), torch.randn(2, 4), loss_fn=torch.sum)
    combined_forward_backward_step(microbatch, None)
    combined_forward_backward_step(None, microbatch, output_grad=torch.tensor(5.0))
    assert linear.bias.grad.tolist() == [10.0] * 4


def test_the_scale_of_a_loss_has_its_precision() -> None:
    """Also where the default dtype has less."""
    linear = torch.nn.Linear(1, 1, dtype=torch.float64)
    microbatch = Microbatch(Stage([linear]), torch.ones(1, 1).double(), loss_fn=torch.sum, loss_grad=1 / 3)
    combined_forward_backward_step(microbatch, None)
    combined_forward_backward_step(None, microbatch)
    assert linear.bias.grad.item() == 1 / 3


@over(2, timeout=120)
def test_pauses_wherever_threads_meet_change_nothing(rank: int, size: int) -> None:
    """Loops whose threads pause wherever two of them meet, against the same without pauses and recomputation."""
    group, problems = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)).get_group("ep"), []
    reference: dict[str, Tensor] = {}
    overlaps = itertools.cycle(("pairs", 2))
    for number, (recompute, overlap) in enumerate([("none", "serial"), *zip(RECOMPUTES, overlaps, strict=False)]):
        model = models.build(group, expert_calls=2, block=Balanced)
        stage = Stage(model, build_exchange(group), recompute=recompute)
        with pauses(100 * number + rank) if number else nullcontext():
            run(stage, 3, overlap, seed=rank)
        found = models.gradients(model)
        reference = reference or found
        problems += [f"{recompute} {overlap}: {name}" for name in models.equal(found, reference)]
    assert not problems, problems


def test_bad_input_is_named() -> None:
    stage = Stage(models.build())
    x, y = models.batch(1)
    fresh = Microbatch(stage, x, y, loss_fn=models.loss_fn)
    with pytest.raises(ValueError, match="neither a forward nor a backward"):
        combined_forward_backward_step(None, None)
    with pytest.raises(ValueError, match="given twice"):
        combined_forward_backward_step(fresh, fresh)
    with pytest.raises(ValueError, match="not between forward and backward"):
        combined_forward_backward_step(None, fresh)
    done = Microbatch(Stage(models.build()), x, y, loss_fn=models.loss_fn)
    combined_forward_backward_step(done, None)
    with pytest.raises(ValueError, match="different exchanges"):
        combined_forward_backward_step(fresh, done)
    twin = Microbatch(Stage(models.build(), stage.exchange), x, y, loss_fn=models.loss_fn)
    here = Microbatch(stage, x, y, loss_fn=models.loss_fn)
    combined_forward_backward_step(here, None)
    with pytest.raises(ValueError, match="two stages of number 0"):
        combined_forward_backward_step(twin, here)
    silent = Microbatch(stage, x)
    combined_forward_backward_step(silent, None)
    with pytest.raises(ValueError, match="neither output_grad nor loss_fn"):
        combined_forward_backward_step(None, silent)


@pytest.mark.parametrize(("overlap", "recompute"), [*zip(OVERLAPS, RECOMPUTES, strict=True)])
def test_auxiliary_losses_have_their_scale_where_routers_are_recomputed(overlap: Overlap, recompute: Recompute) -> None:
    """The last backward is a call without a forward, whose scale it could take."""
    plain, model = models.build(block=Balanced), models.build(block=Balanced)
    set_auxiliary_scale(plain, 1 / 3)
    losses, expected = models.plain_gradients(plain, *models.batch(3), 3)
    assert run(Stage(model, recompute=recompute), 3, overlap) == [float(x) for x in losses]
    assert not models.equal(models.gradients(model), expected)
    assert [m.aux_scale for m in model.modules() if isinstance(m, Router)] == [1.0, 1.0]


@pytest.mark.parametrize("recompute", RECOMPUTES[1:])
def test_autocast_is_around_a_recomputed_forward_as_around_the_first(recompute: Recompute) -> None:
    """The backward is called outside of it, and the weights change before the next forward."""

    def gradients(recompute: Recompute) -> dict[str, Tensor]:
        model, data = models.build(), models.batch(1)
        stage = Stage(model, recompute=recompute)
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        for _ in range(3):
            optimizer.zero_grad()
            microbatch = Microbatch(stage, *data, loss_fn=models.loss_fn)
            with torch.autocast("cpu", torch.bfloat16):
                combined_forward_backward_step(microbatch, None)
            combined_forward_backward_step(None, microbatch)
            optimizer.step()
        return models.gradients(model)

    assert not models.equal(gradients(recompute), gradients("none"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"timeout": "x"}, "timeout='x'; allowed: seconds > 0, at most 1e+09"),
        ({"timeout": -1}, "timeout=-1; allowed: seconds > 0, at most 1e+09"),
        ({"timeout": True}, "timeout=True; allowed: seconds > 0, at most 1e+09"),
        ({"split": "no"}, "split='no'; allowed: True or False"),
        ({"output_grad": 5}, "output_grad=5; allowed: a tensor or several"),
        ({"backward": 5}, "backward=5; allowed: Microbatch or None"),
    ],
)
def test_values_of_another_kind(given: dict[str, Any], message: str) -> None:
    microbatch = Microbatch(Stage(models.build()), models.batch(1)[0])
    combined_forward_backward_step(microbatch, None)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        combined_forward_backward_step(**{"forward": None, "backward": microbatch} | given)
