"""Quantized rows and their products against float32, within what four significant bits allow."""

import pytest
import torch
from torch import Tensor

from overlap1f1b.kernels.choice import Kernels
from overlap1f1b.kernels.fp8 import (
    Precision,
    dequantized,
    narrow_rows,
    quantize,
    quantize_rows,
    scale_bytes,
    widen_rows,
)
from overlap1f1b.kernels.grouped_mm import EightBits, ExpertRows, GroupedMM, grouped_mm
from overlap1f1b.kernels.permute import Layout
from overlap1f1b.plan import row_bytes
from tests.kernels.against import CASES, DEVICE, DTYPES, draw

TORCH = Kernels("torch")
ROUNDED = 2.0**-4
"""Largest error of an element of e4m3, as a part of it: half a step of three bits behind the point."""
LEAST = 2.0**-17
"""Largest error of an element near zero, as a part of its row's largest: half of 2⁻⁹ under a scale of 1/224 or less."""
PRECISIONS: tuple[Precision, ...] = ("fp8", "mxfp8")
RANDOM = ROUNDED * (2 / 3) ** 0.5
"""Largest deviation of a product's error, as a part of the product's, of two factors rounded evenly and apart."""


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES])
def test_an_element_is_rounded_once_to_four_bits(dtype: torch.dtype, precision: Precision) -> None:
    """A block of 32 elements as a row of 32."""
    rows = torch.randn(500, 64).mul_(torch.logspace(-30, 30, 500).unsqueeze(1)).to(dtype)
    rows[3] = 0.0
    rows[4:] *= torch.where(torch.rand(496, 64) < 0.3, 1e-4, 1.0).to(dtype)
    quantized = quantize(rows, precision, TORCH)
    found, wide = dequantized(quantized, torch.float32), rows.float()
    blocks = (500, -1, 64 if precision == "fp8" else 32)
    largest = wide.view(blocks).abs().amax(2, keepdim=True).expand(500, -1, blocks[2]).reshape(500, 64)
    assert ((found - wide).abs() <= torch.maximum(ROUNDED * wide.abs(), LEAST * largest)).all()
    assert (quantized.values.float().view(blocks).abs().amax(2) >= 224)[torch.arange(500) != 3].all()
    assert (torch.frexp(quantized.scales).mantissa == 0.5).all()  # powers of two: nothing is rounded a second time
    again = dequantized(quantized, torch.bfloat16)
    assert torch.equal(again.float(), found)
    assert torch.equal(dequantized(quantize(again, precision, TORCH), torch.float32), found)


@pytest.mark.triton
def test_a_row_that_is_not_finite_stays_so_and_is_alone() -> None:
    rows = torch.randn(4, 32, device=DEVICE)
    rows[1, 3], rows[2, 5] = float("inf"), float("nan")
    alone = dequantized(quantize_rows(rows[3:]), torch.float32)[0]
    for found in (Kernels("triton")(quantize_rows, rows), quantize_rows(rows)):
        wide = dequantized(found, torch.float32)
        assert wide.isfinite().all(1).tolist() == [True, False, False, True]
        assert not wide[1:3].isfinite().any()
        assert torch.equal(wide[3], alone)


def drawn(counts: list[int], dtype: torch.dtype = torch.float32) -> tuple[ExpertRows, Tensor, Tensor, Tensor]:
    """Rows, weights and gradients of uneven experts, with a few large columns, as activations have."""
    ends = torch.tensor(counts, device=DEVICE).cumsum(0, dtype=torch.int32)
    rows, weight = draw(sum(counts), 256, dtype=dtype), draw(len(counts), 96, 256, dtype=dtype)
    rows[:, ::50] *= 20
    return ExpertRows(ends, counts), rows, weight, draw(sum(counts), 96, dtype=dtype)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("counts", [[3, 0, 70, 1], [0, 0], [33]])
def test_products_err_as_their_operands_are_rounded(counts: list[int], precision: Precision) -> None:
    """Also on a GPU, by torch's kernel, with experts whose rows begin anywhere."""
    known, rows, weight, grad = drawn(counts, torch.bfloat16)
    eight = EightBits(TORCH, precision)
    cases = (
        (eight.grouped_mm(rows, weight, known), rows, weight),
        (eight.input_grad(grad, weight, known), grad, weight.mT),
    )
    for found, left, right in cases:
        assert found.dtype == torch.bfloat16
        a, b, apart = left.float().cpu(), right.float().cpu(), found.float().cpu()
        exact = grouped_mm(a, b, counts)
        apart -= exact
        # Each factor within 2⁻⁴, and the sum of all of them rounded to bfloat16 once more.
        allowed = grouped_mm(a.abs(), b.abs(), counts) * (2 * ROUNDED + ROUNDED**2 + 2 * LEAST * 256) + 2**-8
        assert (apart.abs() <= allowed).all()
        if len(a):
            assert RANDOM / 4 < apart.norm() / exact.norm() < RANDOM
        # The kernel on a GPU is the twin's arithmetic: both round to bfloat16. Hopper cuts summands of eight bits to 14
        # bits of the largest of 32.
        twin = grouped_mm(*(dequantized(quantize(x, precision, TORCH), torch.float32) for x in (a, b)), counts)
        sums = grouped_mm(a.abs(), b.abs(), counts) * (2**-10 if DEVICE == "cuda" else 2**-20)
        assert ((found.float().cpu() - twin).abs() <= 2**-8 * twin.abs() + sums).all()


def test_weight_gradients_are_of_what_was_not_quantized() -> None:
    counts, rows, weight, grad = drawn([3, 0, 20])
    rows.requires_grad_()
    found, plain = weight.clone().requires_grad_(), weight.clone().requires_grad_()
    eight = EightBits(TORCH, "fp8")
    y = GroupedMM.apply(rows, found, counts, eight)
    y.backward(grad)
    assert torch.equal(rows.grad, eight.input_grad(grad, weight, counts))  # type: ignore[arg-type]
    GroupedMM.apply(rows, plain, counts).backward(grad)
    assert torch.equal(found.grad, plain.grad)  # type: ignore[arg-type]
    assert not torch.equal(y, grouped_mm(rows.detach(), weight, counts))


@torch.no_grad()
def test_a_weight_that_was_kept_and_has_changed_is_quantized_anew() -> None:
    counts, rows, weight, grad = drawn([3, 0, 20])
    parameter, keeps, plain = torch.nn.Parameter(weight), EightBits(TORCH, "fp8", keeps=True), EightBits(TORCH, "fp8")
    for _ in range(2):
        assert torch.equal(keeps.grouped_mm(rows, parameter, counts), plain.grouped_mm(rows, weight, counts))
        assert torch.equal(keeps.input_grad(grad, parameter, counts), plain.input_grad(grad, weight, counts))
        parameter.mul_(-0.7)  # the memory of weight, too


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES])
@pytest.mark.parametrize("wide", [torch.bfloat16, torch.float32, torch.float64])
def test_sent_rows_carry_scales_and_all_else_as_it_is(
    dtype: torch.dtype, wide: torch.dtype, precision: Precision
) -> None:
    layout, narrow = (
        Layout.of(torch.empty(0, 96, dtype=dtype), torch.empty(0, 3, dtype=wide), scales=scales)
        for scales in (0, scale_bytes(96, precision))
    )
    assert narrow.width * dtype.itemsize == row_bytes(96, 3, dtype.itemsize, wide.itemsize, precision)
    packed = torch.zeros(7, layout.width, dtype=dtype)
    rows, weights, chosen = layout.opened(packed)
    rows.copy_(torch.randn(7, 96))
    weights.copy_(torch.rand(7, 3))
    chosen[:, :3] = torch.randint(300, (7, 3))
    sent = narrow_rows(packed, layout, narrow, precision, TORCH)
    assert sent.shape == (7, narrow.width)
    assert sent.dtype == dtype
    found = layout.opened(widen_rows(sent, layout, narrow, precision))
    assert torch.equal(found[0], dequantized(quantize(rows, precision, TORCH), dtype))
    assert torch.equal(found[1], weights)
    assert torch.equal(found[2], chosen)


@pytest.mark.triton
@pytest.mark.parametrize(("T", "K", "E", "H", "dtype"), CASES)
def test_triton_quantizes_to_the_same_numbers(T: int, K: int, E: int, H: int, dtype: torch.dtype) -> None:
    for rows in (draw(T, 2 * H, dtype=dtype)[:, :H], draw(K, H, E, dtype=dtype).mT, draw(K, E, H, dtype=dtype) * 1e-30):
        found, expected = Kernels("triton")(quantize_rows, rows), quantize_rows(rows)
        assert torch.equal(found.values.float(), expected.values.float())
        assert torch.equal(found.scales, expected.scales)
