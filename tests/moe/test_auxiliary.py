"""Auxiliary losses against loops, and the carrier against adding them to the total loss."""

import math

import pytest
import torch
from torch import Tensor, nn

from overlap1f1b.moe import MoE, Router, RouterConfig, set_auxiliary_scale
from overlap1f1b.moe.auxiliary import attach, attach_balance, z_loss


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def count(indices: Tensor, experts: int) -> Tensor:
    return indices.flatten().bincount(minlength=experts)


# The carrier.


def test_attach_returns_the_weights_and_gives_the_loss_its_scale() -> None:
    weights, loss = draw(3, 2).bfloat16().requires_grad_(), torch.tensor(7.0, requires_grad=True)
    carried = attach(weights, loss, 0.3)
    assert torch.equal(carried, weights)
    cotangent = draw(3, 2, seed=1).bfloat16()
    carried.backward(cotangent)
    assert torch.equal(weights.grad, cotangent)
    assert torch.equal(loss.grad, torch.tensor(0.3))  # whatever the cotangent, and not rounded to the weights' dtype


# The losses.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("T", "K", "E"), [(0, 2, 3), (1, 1, 1), (7, 1, 5), (13, 3, 5), (60, 4, 128)])
def test_the_gradient_for_balance_is_autograds_of_the_formula(T: int, K: int, E: int, dtype: torch.dtype) -> None:
    weights, probabilities = draw(T, K).bfloat16(), draw(T, E, seed=1).to(dtype).softmax(-1).requires_grad_()
    counts = count(draw(T, E, seed=2).topk(K).indices, E)
    loss = E * torch.dot(counts.to(dtype) / counts.sum().clamp(min=1), probabilities.sum(0) / max(T, 1))
    cotangent = draw(T, K, seed=3).bfloat16()
    every = []
    for carried in (attach_balance(weights.requires_grad_(), probabilities, counts, 0.3), attach(weights, loss, 0.3)):
        assert torch.equal(carried, weights)
        every.append(torch.autograd.grad(carried, (weights, probabilities), cotangent))
    (of_weights, found), (same, expected) = every
    assert torch.equal(of_weights, same)
    # Rounded once; each of the formula's four operations rounds, and would be a launch.
    assert torch.allclose(found, expected, rtol=4 * torch.finfo(dtype).eps, atol=0)
    if T:  # the loss is linear in the probabilities
        assert loss.item() == pytest.approx(float((probabilities.detach() * found).sum() / 0.3), rel=1e-5)


def test_z_loss_is_that_of_the_loops() -> None:
    logits = draw(7, 5)
    expected = sum(math.log(sum(math.exp(x) for x in row)) ** 2 for row in logits.tolist()) / 7
    assert z_loss(logits).item() == pytest.approx(expected, rel=1e-13)
    assert torch.autograd.gradcheck(z_loss, logits.requires_grad_())
    assert z_loss(torch.empty(0, 4)).item() == 0


@pytest.mark.parametrize("real", [0, 1, 5, 9])
def test_of_a_mask_only_real_tokens_count(real: int) -> None:
    mask = torch.arange(9).roll(3) < real
    weights, logits = draw(9, 2), draw(9, 5, seed=1)
    counts = count(logits[mask].topk(2).indices, 5)
    every = []
    for rows, given in ((slice(None), mask), (mask, None)):
        leaf = logits[rows].clone().requires_grad_()
        carried = attach_balance(weights[rows].clone().requires_grad_(), leaf.softmax(-1), counts, 0.3, given)
        carried = attach(carried, z_loss(leaf, given), 0.1)
        (found,) = torch.autograd.grad(carried, leaf, torch.zeros_like(carried))
        every.append(found)
    assert torch.equal(every[0][mask], every[1])
    assert not every[0][~mask].any()
    assert z_loss(logits, mask).item() == pytest.approx(z_loss(logits[mask]).item(), rel=1e-14)


# In the router.


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("aux", "z"), [(0.2, 0.0), (0.0, 0.3), (0.2, 0.3)])
def test_a_routers_gradient_is_that_of_the_sum(score: str, aux: float, z: float) -> None:
    T, H, E, K, scale = 11, 5, 6, 2, 0.25
    grads = []
    for attached in (True, False):
        coefficients = {"aux_coefficient": aux, "z_coefficient": z} if attached else {}
        torch.manual_seed(0)
        router = Router(H, RouterConfig(E, K, score=score, **coefficients), dtype=torch.float64)
        router.aux_scale = scale
        tokens = draw(T, H, seed=1).requires_grad_()
        indices, weights = router(tokens)
        total = (weights * draw(T, K, seed=2)).sum()
        if not attached:
            logits = tokens @ router.gate.weight.T
            s = logits.exp() if score == "softmax" else 1 / (1 + (-logits).exp())
            mean = (s / s.sum(1, keepdim=True)).mean(0)
            f = torch.tensor([(indices == e).sum().item() / (T * K) for e in range(E)], dtype=torch.float64)
            total = total + scale * aux * E * (f * mean).sum()
            total = total + scale * z * (logits.exp().sum(1).log() ** 2).mean()
        total.backward()
        grads.append([router.gate.weight.grad, tokens.grad])
    torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-14)


def test_nothing_is_attached_in_eval_mode() -> None:
    torch.manual_seed(0)
    router = Router(5, RouterConfig(6, 2, aux_coefficient=0.2, z_coefficient=0.3)).eval()
    (router(torch.randn(11, 5))[1] * 0).sum().backward()
    assert torch.equal(router.gate.weight.grad, torch.zeros(6, 5))
    router.train()
    (router(torch.randn(11, 5))[1] * 0).sum().backward()
    assert router.gate.weight.grad.abs().max() > 1e-3


def test_the_scale_reaches_every_router_and_is_read_in_the_forward() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(MoE(8, 4, RouterConfig(4, 2, aux_coefficient=0.5)) for _ in range(3)))
    routers = [layer.router for layer in model]
    assert [router.aux_scale for router in routers] == [1.0] * 3
    tokens = torch.randn(10, 8)

    def gradient(before: float, after: float) -> list[Tensor]:
        model.zero_grad()
        set_auxiliary_scale(model, before)
        output = model(tokens)
        set_auxiliary_scale(model, after)
        output.backward(torch.zeros_like(output))
        return [router.gate.weight.grad.clone() for router in routers]

    whole, half = gradient(1.0, 0.25), gradient(0.5, 1.0)
    assert all(g.abs().max() > 0 for g in whole)
    torch.testing.assert_close(half, [g / 2 for g in whole])
