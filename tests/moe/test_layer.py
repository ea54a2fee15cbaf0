"""The MoE layer against loops over tokens and experts, and its call of experts."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from overlap1f1b.moe import MoE, Router, RouterConfig, SwiGLU, set_auxiliary_scale

H, I, E, K = 6, 5, 7, 3  # noqa: E741  the letters of the legend


def make(shared: int = 0, **options: Any) -> MoE:
    torch.manual_seed(0)
    moe = MoE(H, I, RouterConfig(E, K, **options), shared_intermediate=shared, dtype=torch.float64)
    moe.experts.reset_parameters(torch.Generator().manual_seed(1), std=1.0)
    return moe


def swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    size = down.shape[1]
    gate, up = gate_up[:size] @ x, gate_up[size:] @ x
    return down @ (gate / (1 + (-gate).exp()) * up)


def plain(moe: MoE, x: Tensor) -> Tensor:
    rows = []
    for token in x.reshape(-1, H):
        scores = (moe.router.gate.weight @ token).softmax(0)
        chosen = scores.argsort(descending=True)[:K].tolist()
        total = sum(scores[e] for e in chosen)
        row = torch.zeros(H, dtype=torch.float64)
        for e in chosen:
            row = row + scores[e] / total * swiglu(token, moe.experts.gate_up[e], moe.experts.down[e])
        if moe.shared is not None:
            row = row + swiglu(token, moe.shared.gate_up.weight, moe.shared.down.weight)
        rows.append(row)
    return torch.stack(rows).view(x.shape)


@pytest.mark.parametrize("shared", [0, 3])
@pytest.mark.parametrize("shape", [(1, H), (9, H), (2, 5, H), (1, 1, H)])
def test_values_and_gradients_are_those_of_the_loops(shape: tuple[int, ...], shared: int) -> None:
    moe = make(shared)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    cotangent = torch.randn(shape, dtype=torch.float64)
    got, want = moe(x), plain(moe, x)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)
    over = [x, *moe.parameters()]
    torch.testing.assert_close(
        torch.autograd.grad(got, over, cotangent), torch.autograd.grad(want, over, cotangent), rtol=1e-11, atol=1e-13
    )


@pytest.mark.parametrize("shape", [(0, H), (0, 4, H), (3, 0, H)])
def test_no_tokens(shape: tuple[int, ...]) -> None:
    moe = make(shared=3, score="sigmoid", aux_coefficient=0.1, z_coefficient=0.1)
    y = moe(torch.empty(shape, dtype=torch.float64, requires_grad=True))
    y.sum().backward()
    assert y.shape == shape
    for parameter in moe.parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))
    moe.router.update_correction_bias(0.1)
    assert moe.router.correction_bias.isfinite().all()


@pytest.mark.parametrize("shape", [(12, H), (3, 4, H)])
def test_a_mask_leaves_the_real_tokens(shape: tuple[int, ...]) -> None:
    """A product of another number of rows may round otherwise, hence the tolerance."""
    mask = torch.rand(shape[:-1]) < 0.6
    x, cotangent = torch.randn(2, *shape, dtype=torch.float64)
    found = []
    for rows, masks in ((..., (mask,)), (mask, ())):
        moe = make(shared=3, aux_coefficient=0.1, z_coefficient=0.1)
        leaf = x[rows].clone().requires_grad_()
        y = moe(leaf, *masks)
        y.backward(cotangent[rows])
        if masks:
            assert not y[~mask].any()
            assert not leaf.grad[~mask].any()
            y = y[mask]
        of_tokens = leaf.grad[mask] if masks else leaf.grad
        found.append((moe.router.load, y, of_tokens, [p.grad for p in moe.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-13)


def test_a_mask_of_another_shape_is_one_line() -> None:
    with pytest.raises(ValueError, match="allowed") as raised:
        make()(torch.zeros(3, 4, H, dtype=torch.float64), torch.ones(4, 3, dtype=torch.bool))
    assert str(raised.value) == (
        "mask torch.bool [4, 3] on 'cpu' of tokens [3, 4, 6]; allowed: torch.bool [12] or [3, 4] on 'cpu', True for "
        "real tokens"
    )


def test_tokens_in_any_layout() -> None:
    moe = make(shared=3)
    x = torch.randn(5, 2, H, dtype=torch.float64)
    assert torch.equal(moe(x.transpose(0, 1)), moe(x.transpose(0, 1).contiguous()))


def test_experts_are_called_once_before_the_shared_expert() -> None:
    moe = make(shared=3)
    calls: list[str] = []

    class Stand(torch.nn.Module):
        def forward(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
            calls.append("experts")
            assert tokens.shape == (10, H)
            assert indices.shape == weights.shape == (10, K)
            assert indices.dtype == torch.int64
            return 2 * tokens

    moe.experts = Stand()  # type: ignore[assignment]
    moe.shared.register_forward_hook(lambda *_: calls.append("shared"))  # type: ignore[union-attr]
    x = torch.randn(2, 5, H, dtype=torch.float64)
    y = moe(x)
    assert calls == ["experts", "shared"]
    assert torch.equal(y, 2 * x + moe.shared(x.view(10, H)).view(2, 5, H))  # type: ignore[misc]


ROUTER = RouterConfig(8, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MoE(8, 4, "top2"), "router='top2'; allowed: RouterConfig"),  # type: ignore[arg-type]
        (lambda: MoE(8, 4, ROUTER, dtype=torch.int32), "dtype=torch.int32; allowed: a floating one, such as torch.bf"),
        (lambda: MoE(8, 4, ROUTER, device="tpu"), "device='tpu': Expected one of cpu, cuda, "),
        (lambda: Router(8, ROUTER, dtype="half"), "dtype='half'; allowed: torch.dtype or None"),  # type: ignore[arg-type]
        (lambda: SwiGLU(8, "16"), "intermediate='16'; allowed: a whole number, 1 or more"),  # type: ignore[arg-type]
        (lambda: RouterConfig(8, 2, normalize="no"), "normalize='no'; allowed: True or False"),  # type: ignore[arg-type]
        (lambda: set_auxiliary_scale(MoE(8, 4, ROUTER), "x"), "scale='x'; allowed: a finite number"),  # type: ignore[arg-type]
        (lambda: set_auxiliary_scale(5, 0.1), "model=5; allowed: Module"),  # type: ignore[arg-type]
    ],
)
def test_values_of_another_kind(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        make()
