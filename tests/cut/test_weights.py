"""Gradients of cut graphs, weight gradients apart, and main gradients."""

from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from overlap1f1b.cut.weights import SplitLinear
from overlap1f1b.engine import Engine
from overlap1f1b.plan import Recompute
from overlap1f1b.play.gradients import WeightQueue
from overlap1f1b.schedule import build_schedule
from tests import models
from tests.engine.test_engine import overlaps_of, programs, step
from tests.engines import COSTS, make


@pytest.mark.parametrize("fused", [False, True])
def test_a_waiting_weight_gradient_holds_no_weight(fused: bool) -> None:
    """Hooks that keep saved tensors elsewhere bring a weight back for the backward: a copy, in a device's memory."""
    brought: list[tuple[torch.Size, StorageWeakRef]] = []

    def bring(kept: Tensor) -> Tensor:
        copied = kept.clone()
        brought.append((copied.shape, StorageWeakRef(copied.untyped_storage())))
        return copied

    linear, x, queue = nn.Linear(5, 3), torch.randn(7, 5, requires_grad=True), WeightQueue()
    add = (lambda grad, x: grad.t() @ x) if fused else None
    with torch.autograd.graph.saved_tensors_hooks(Tensor.clone, bring):
        y = SplitLinear.apply(x, (linear.weight,), linear.bias, queue.put, torch.empty(0, requires_grad=True), add)
    y.sum().backward()
    assert [shape for shape, memory in brought if not memory.expired()] == [x.shape]
    assert queue.compute()[linear.weight].shape == linear.weight.shape


H = 8


class Layers(nn.Module):
    """Layers for a body, which is given them and its input."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.energy = body, nn.Linear(H, 1)
        self.a, self.b, self.c, self.d = (nn.Linear(H, H) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def gradient_by_the_input(s: Layers, x: Tensor, *, create_graph: bool = False) -> Tensor:
    (force,) = torch.autograd.grad(s.energy(x.tanh()).sum(), x, create_graph=create_graph)
    return s.a(x) - 0.1 * force


def its_own_gradient(s: Layers, x: Tensor) -> Tensor:
    return gradient_by_the_input(s, x, create_graph=True)


def weight_made_in_the_forward(s: Layers, x: Tensor) -> Tensor:
    return torch.func.functional_call(s.a, {"weight": s.a.weight * s.b(x.mean((0, 1)))}, (x,))


def transforms(s: Layers, x: Tensor) -> Tensor:
    force = torch.func.grad(lambda z: s.energy(z.tanh()).sum())(x)
    return torch.vmap(s.a)(x) - 0.1 * force


def outputs_in_place(s: Layers, x: Tensor) -> Tensor:
    y, z, w, v = (layer(x) for layer in (s.a, s.b, s.c, s.d))
    y.relu_()
    z += 1
    w[..., :3].mul_(2)
    v[:, 0] = 0
    return y + z + w + v


def gradients_by_weights(s: Layers, x: Tensor) -> Tensor:
    """By a parameter, and by a weight that is made in the forward."""
    plain = F.linear(x, s.a.weight).square().sum()
    (slope,) = torch.autograd.grad(plain, s.a.weight, create_graph=True)
    weight = s.a.weight.detach().clone().requires_grad_()
    inner = torch.func.functional_call(s.a, {"weight": weight}, (x,)).square().sum()
    (step,) = torch.autograd.grad(inner, weight)
    return s.b(x) + (slope.sum() + step.sum()) * 1e-3 * s.a(x)


class Checkpoint(torch.autograd.Function):
    """Runs a function again in its backward, and asks for the gradients of its parameters there."""

    @staticmethod
    def forward(ctx: Any, function: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.function, ctx.x, ctx.parameters = function, x, parameters
        with torch.no_grad():
            y: Tensor = function(x)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        return None, *torch.autograd.grad(y, [x, *ctx.parameters], grads, allow_unused=True)


def checkpoint(s: Layers, x: Tensor) -> Tensor:
    return Checkpoint.apply(lambda z: s.b(s.a(z).tanh()), x, *s.a.parameters(), *s.b.parameters())


BODIES = [gradient_by_the_input, its_own_gradient, weight_made_in_the_forward, transforms, outputs_in_place]
BODIES += [gradients_by_weights, checkpoint]


@pytest.mark.parametrize("overlap", ["serial", 3])
@pytest.mark.parametrize("body", BODIES)
def test_layers_may_be_used_as_outside_an_engine(body: Any, overlap: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(H, H), Layers(body), nn.Linear(H, H))
    assert not _differences(model, torch.randn(6, 5, H), torch.randn(6, 5, H), nn.functional.mse_loss, overlap)


def test_complex_layers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(H, H, dtype=torch.cfloat), nn.Linear(H, H, dtype=torch.cfloat))
    x, target = (torch.randn(6, 5, H, dtype=torch.cfloat) for _ in range(2))
    assert not _differences(model, x, target, lambda out, t: (out - t).abs().square().mean(), 3)


def test_autocast_leaves_double_layers_alone() -> None:
    model = nn.Sequential(nn.Linear(H, H), nn.Linear(H, H)).double()
    with torch.autocast("cpu", torch.bfloat16):
        x, target = (torch.randn(6, 5, H, dtype=torch.float64) for _ in range(2))
        assert not _differences(model, x, target, nn.functional.mse_loss, 3)


def test_a_layer_may_be_frozen_between_steps_of_one_rank() -> None:
    model, x = nn.Sequential(nn.Linear(H, H), nn.Linear(H, H)), torch.randn(6, 5, H)
    engine = Engine(model, build_schedule("combined_1f1b", microbatches=3), loss_fn=nn.functional.mse_loss)
    for frozen in (None, 0, 1):
        model.zero_grad()
        for index, layer in enumerate(model):
            layer.requires_grad_(index != frozen)
        engine.step(x, target=x)
        assert [p.grad is None for p in model.parameters()] == [frozen == 0] * 2 + [frozen == 1] * 2


def _differences(model: nn.Module, x: Tensor, target: Tensor, loss_fn: Any, overlap: Any) -> list[str]:
    """Return the parameters whose gradient by an engine is another than by a plain loop, over three steps."""
    models.plain_gradients(model, x, target, 3, loss_fn=loss_fn)
    expected = {name: p.grad for name, p in model.named_parameters()}
    program, found = build_schedule("combined_1f1b", microbatches=3), list[str]()
    engine = make(model, program, loss_fn=loss_fn, overlap=overlap, verify=False)
    for _ in range(3):
        model.zero_grad()
        engine.step(x, target=target)
        for name, p in model.named_parameters():
            if (p.grad is None) != (expected[name] is None):
                found.append(f"{name} has a gradient on one side only")
            elif p.grad is not None and not torch.allclose(p.grad, expected[name], rtol=1e-5, atol=1e-6):
                found.append(name)
    return found


def _stepped(build: Callable[[], nn.Sequential], data: tuple[Tensor, Tensor]) -> Iterator[tuple[str, nn.Sequential]]:
    """Models after a step of three microbatches in each program, in overlaps that take turns, each with a recompute."""
    for number, (program, recompute) in enumerate(zip(programs(3), get_args(Recompute), strict=True)):
        for overlap in overlaps_of(number, every=False):
            model = build()
            step(model, program, overlap, data, recompute=recompute, verify=False)
            yield f"{program.name} {overlap} {recompute}", model


def test_frozen_parameters_and_bias_free_layers_are_right() -> None:
    data = models.batch(3)

    def build() -> nn.Sequential:
        model = models.build()
        for name, parameter in model.named_parameters():
            frozen = any(part in name for part in ("1.mix.weight", "3.experts", "post.0.bias", "0.w"))
            parameter.requires_grad_(not frozen)
        return model

    _, expected = models.plain_gradients(build(), *data, 3)
    for where, model in _stepped(build, data):
        assert not models.equal(models.gradients(model), expected), where
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


def test_a_weight_used_by_a_split_layer_and_otherwise_is_summed_once() -> None:
    class Twice(models.Block):
        def around(self, experts: nn.Module, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
            y = experts(tokens, indices, weights)
            return self.mix(y) + self.mix(tokens) + torch.nn.functional.linear(tokens, self.mix.weight)

    data, reference = models.batch(3), dict[str, Tensor]()
    _, expected = models.plain_gradients(models.build(block=Twice), *data, 3)
    for where, model in _stepped(lambda: models.build(block=Twice), data):
        found = models.gradients(model)
        reference = reference or found
        assert not models.equal(found, reference), where
    torch.testing.assert_close(reference, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("hooked", [False, True])
def test_experts_add_to_their_main_gradients(hooked: bool) -> None:
    """In whatever order; with Megatron's flag, hooks get a gradient of no meaning and are told so."""
    data, found, seen = models.batch(3), [], []
    _, expected = models.plain_gradients(models.build(), *data, 3)
    for overlap in ("serial", 3):
        model = models.build()
        mine = {n: p for n, p in model.named_parameters() if n.endswith(("gate_up", "down"))}
        for parameter in mine.values():
            parameter.main_grad = torch.ones_like(parameter)
            if hooked:
                parameter.grad_added_to_main_grad = False
                parameter.register_post_accumulate_grad_hook(_let_go(seen))
        program = build_schedule("combined_1f1b", microbatches=3, extra_warmup=1)
        engine = make(model, program, overlap=overlap, costs=COSTS, verify=not hooked)
        engine.step(data[0], target=data[1])
        assert all(p.grad is None for p in mine.values())
        assert {n for n, p in model.named_parameters() if p.grad is not None} == set(expected) - set(mine)
        for name, parameter in mine.items():
            torch.testing.assert_close(parameter.main_grad - 1, expected[name], rtol=1e-4, atol=1e-6)
        found.append({n: p.main_grad for n, p in mine.items()})
        with pytest.raises(ValueError, match="in main_grad; allowed: the optimizer's own clipping"):
            engine.clip_gradients(1.0)
    assert len(mine) == 4
    assert not models.equal(*found)
    assert seen == [True] * (2 * 3 * 4 if hooked else 0)


def _let_go(seen: list[bool]) -> Any:
    def hook(parameter: Any) -> None:
        seen.append(parameter.grad_added_to_main_grad)
        parameter.grad = None

    return hook
