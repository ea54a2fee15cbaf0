"""Gradients of cut graphs, weight gradients apart, and main gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overlap1f1b.engine import Engine
from overlap1f1b.engine.run.autograd import Root, SplitLinear, WeightQueue, accumulate
from overlap1f1b.plan import NodeCosts
from overlap1f1b.schedule import build_schedule
from tests import models
from tests.engine.test_engine import OVERLAPS, programs, step

COSTS = NodeCosts.uniform(attention=3, experts=4, dispatch=5)


@pytest.mark.parametrize("bias", [False, True])
def test_a_split_layer_queues_its_weight_gradient_and_gives_all_others(bias: bool) -> None:
    linear, x, queue = nn.Linear(5, 3, bias=bias), torch.randn(2, 7, 5, requires_grad=True), WeightQueue()
    y = SplitLinear.apply(x, (linear.weight,), linear.bias, queue, torch.empty(0, requires_grad=True))
    grad = torch.randn_like(y)
    expected = torch.autograd.grad(F.linear(x, linear.weight, linear.bias), [x, *linear.parameters()], grad)
    y.backward(grad)
    found = [x.grad, *([linear.bias.grad] if bias else [])]
    assert linear.weight.grad is None
    assert all(torch.equal(a, b) for a, b in zip(found, [expected[0], *expected[2:]], strict=True))
    assert torch.equal(queue.compute()[linear.weight], expected[1])
    assert queue.compute() == {}


def test_a_queue_sums_what_it_keeps_and_what_it_computes() -> None:
    weight, queue = nn.Parameter(torch.zeros(2)), WeightQueue()
    queue.keep(weight, torch.tensor([1.0, 2.0]))
    queue.put(weight, lambda: torch.tensor([10.0, 20.0]))
    queue.put(weight, lambda: None)  # added elsewhere
    assert queue.compute()[weight].tolist() == [11, 22]


def test_accumulating_fires_each_parameters_hooks_once_and_takes_a_first_gradient_as_it_is() -> None:
    weight, fired = nn.Parameter(torch.zeros(2)), []
    weight.register_post_accumulate_grad_hook(fired.append)
    accumulate({weight: torch.ones(2)})
    first = weight.grad
    accumulate({weight: torch.ones(2)})
    assert weight.grad is first
    assert weight.grad.tolist() == [2, 2]
    assert len(fired) == 2


def test_a_root_takes_gradients_of_its_shape_or_a_scalar() -> None:
    root = Root.of(torch.zeros(2, 3, requires_grad=True) * 2)
    assert root is not None
    assert root.checked(torch.tensor(4.0), "block 0").tolist() == [[4.0] * 3] * 2
    with pytest.raises(ValueError, match=r"a gradient of shape \(3, 2\) for an output of block 0; allowed: \(2, 3\)"):
        root.checked(torch.zeros(3, 2), "block 0")
    assert Root.of(torch.zeros(2)) is None


def test_frozen_parameters_and_bias_free_layers_are_right() -> None:
    data = models.batch(3)

    def freeze(model: nn.Sequential) -> nn.Sequential:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(
                not any(part in name for part in ("1.mix.weight", "3.experts", "post.0.bias", "0.w"))
            )
        return model

    _, expected = models.plain_gradients(freeze(models.build()), *data, 3)
    for program in programs(3):
        for overlap in OVERLAPS:
            model = freeze(models.build())
            step(model, program, overlap, data)
            assert not models.equal(models.gradients(model), expected), (program.name, overlap)
            assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


def test_a_weight_used_by_a_split_layer_and_otherwise_is_summed_once() -> None:
    class Twice(models.Block):
        def around(self, experts: nn.Module, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
            y = experts(tokens, indices, weights)
            return self.mix(y) + self.mix(tokens) + torch.nn.functional.linear(tokens, self.mix.weight)

    data, reference = models.batch(3), None
    _, expected = models.plain_gradients(models.build(block=Twice), *data, 3)
    for program in programs(3):
        for overlap in OVERLAPS:
            model = models.build(block=Twice)
            step(model, program, overlap, data)
            found = models.gradients(model)
            reference = reference or found
            assert not models.equal(found, reference), (program.name, overlap)
    for name, gradient in (reference or {}).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6)


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
        engine = Engine(model, program, loss_fn=models.loss_fn, overlap=overlap, costs=COSTS)
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
