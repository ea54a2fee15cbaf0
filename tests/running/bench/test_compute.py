"""Timed compute: which kernels are replaced, what is counted, and that torch's own kernels come back."""

import math
import time

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overlap1f1b.running.bench.compute import TimedCompute, operations_per_second
from overlap1f1b.running.transformer import MoEConfig, MoETransformer

CONFIG = MoEConfig(vocabulary=256, layers=1, hidden=32, heads=2, experts=4, intermediate=24, sequence=8)


def products() -> list[Tensor]:
    a, b = torch.ones(3, 4, requires_grad=True), torch.ones(4, 5)
    out = torch.full((3, 5), 7.0)
    torch.mm(a.detach(), b, out=out)
    q = torch.ones(1, 2, 6, 4)
    attention = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    return [a @ b, F.linear(a, b.t(), torch.ones(5)), torch.bmm(a[None], b[None]), out, attention, F.silu(a)]


def test_products_are_zeros_while_it_lasts_and_real_where_asked() -> None:
    before, compute = products(), TimedCompute(math.inf)
    with compute:
        assert all(not x.any() for x in products())
        inside = compute.real(products)()
    for found in (inside, products()):
        assert all(torch.equal(a, b) for a, b in zip(before, found, strict=True))


def test_kernels_come_back_after_an_error() -> None:
    with pytest.raises(ArithmeticError), TimedCompute(math.inf):
        raise ArithmeticError
    assert all(x.any() for x in products())


def test_a_timed_model_runs_forward_and_backward_and_is_left_as_it_was() -> None:
    model, tokens = MoETransformer(CONFIG), torch.randint(256, (2, 8))
    with TimedCompute(math.inf).entered(model):
        logits = model(tokens)
        logits.sum().backward()
    assert not logits.any()
    assert all(p.grad is not None for p in model.parameters())
    assert "forward" not in next(m for m in model.modules() if type(m).__name__ == "Router").__dict__
    assert model(tokens).any()


def test_operations_are_counted() -> None:
    compute = TimedCompute(math.inf)
    with compute:
        layer = nn.Linear(8, 6)
        layer(torch.ones(5, 8, requires_grad=True)).sum().backward()
    assert compute.operations == 3 * 2 * 5 * 8 * 6  # forward, and gradients of input and weight


def test_products_take_the_time_of_their_operations() -> None:
    a = torch.ones(100, 100)
    with TimedCompute(2e7):  # a product of two million operations
        start = time.perf_counter()
        a @ a
        assert time.perf_counter() - start >= 0.1


def test_kernels_are_measured() -> None:
    before, compute = products(), TimedCompute(None)
    with compute:
        inside = products()
    assert all(torch.equal(a, b) for a, b in zip(before, inside, strict=True))
    assert compute.seconds > 0
    assert compute.operations == 3 * 2 * 3 * 4 * 5 + 2 * 3 * 4 * 5 + 2 * 2 * 6 * 4 * 6


def test_a_measured_pass_leaves_the_model_as_it_was() -> None:
    tokens, model, threads = torch.randint(256, (2, 8)), MoETransformer(CONFIG), torch.get_num_threads()
    assert operations_per_second(model, lambda: model(tokens).sum()) > 0
    assert model(tokens).any()
    assert torch.get_num_threads() == threads
