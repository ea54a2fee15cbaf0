"""Grouped matrix products against one product per expert."""

import pytest
import torch

from overlap1f1b.kernels.choice import Kernels
from overlap1f1b.kernels.grouped_mm import (
    ExpertRows,
    GroupedMM,
    KnownRows,
    add_weight_grad_,
    aligned,
    grouped_mm,
    grouped_mm_input_grad,
    grouped_mm_weight_grad,
    offsets,
)
from tests.kernels.against import DEVICE, DTYPES, draw


@pytest.mark.parametrize("counts", [[3, 0, 5], [0, 0, 0], [1], [0, 7, 0, 2]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_against_a_loop(counts: list[int], dtype: torch.dtype) -> None:
    rows, grad = torch.randn(sum(counts), 6).to(dtype), torch.randn(sum(counts), 5).to(dtype)
    weight = torch.randn(len(counts), 5, 6).to(dtype)
    parts = list(zip(rows.split(counts), grad.split(counts), weight, strict=True))
    torch.testing.assert_close(grouped_mm(rows, weight, counts), torch.cat([r @ w.t() for r, _, w in parts]))
    torch.testing.assert_close(grouped_mm_input_grad(grad, weight, counts), torch.cat([g @ w for _, g, w in parts]))
    expected = torch.stack([g.t() @ r for r, g, _ in parts])
    found = grouped_mm_weight_grad(grad, rows, counts)
    torch.testing.assert_close(found, expected)
    assert all(not found[e].any() for e, count in enumerate(counts) if count == 0)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("wide", [64, 512], ids=["small", "large"])  # torch has a kernel for each
def test_experts_without_rows_have_no_gradient_on_a_gpu(wide: int) -> None:
    """Torch's product may leave what was in its memory before."""
    counts = ExpertRows(torch.tensor([0, 130, 130, 137, 137], dtype=torch.int32, device=DEVICE))
    rows, grad = draw(137, 256, dtype=torch.bfloat16), draw(137, wide, dtype=torch.bfloat16)
    before = torch.full((5, wide, 256), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    place = before.data_ptr()
    del before
    found = grouped_mm_weight_grad(grad, rows, counts)
    assert found.data_ptr() == place  # else nothing is shown
    assert not found[[0, 2, 4]].any()
    expected = grad[:130].t() @ rows[:130]
    torch.testing.assert_close(found[1], expected, rtol=2e-2, atol=2e-1)


def test_rows_that_belong_to_no_expert_are_left_out() -> None:
    """Counts that only the device knows, and rows beyond them that hold anything."""
    counts = ExpertRows(torch.tensor([2, 2, 5], dtype=torch.int32))
    rows, weight, grad = torch.randn(7, 4), torch.randn(3, 6, 4), torch.randn(7, 6)
    rows[5:], grad[5:] = float("nan"), float("nan")
    known = [2, 0, 3]
    assert torch.equal(grouped_mm(rows, weight, counts)[:5], grouped_mm(rows[:5], weight, known))
    assert torch.equal(grouped_mm_input_grad(grad, weight, counts)[:5], grouped_mm_input_grad(grad[:5], weight, known))
    found = grouped_mm_weight_grad(grad, rows, counts)
    assert torch.equal(found, grouped_mm_weight_grad(grad[:5], rows[:5], known))


def test_rows_that_the_host_knows_are_a_list_with_offsets_on_the_device() -> None:
    """An experts module of a user's own may split by them; nothing is copied to the device again."""
    counts, rows = ExpertRows(torch.tensor([3, 3, 5], dtype=torch.int32)), torch.randn(5, 4)
    known = KnownRows(counts)
    assert counts.counts.tolist() == [3, 0, 2]
    assert [len(part) for part in rows.split(known)] == known == [3, 0, 2]
    assert offsets(known, rows) is offsets(known, rows)
    assert torch.equal(offsets(known, rows), offsets([3, 0, 2], rows))


def test_rows_are_copied_only_where_they_do_not_begin_at_16_bytes() -> None:
    memory = torch.randn(65)
    whole = memory[:64].view(4, 16)
    for rows in (whole, whole[:, :8], whole[:, 8:], whole[1:]):
        assert aligned(rows) is rows
    for rows in (memory[1:].view(4, 16), whole[:, 1:9], whole.t(), whole[:1].expand(4, 16)):
        copied = aligned(rows)
        assert torch.equal(copied, rows)
        assert copied.data_ptr() % 16 == 0
        assert copied.is_contiguous()
        assert copied.data_ptr() != rows.data_ptr()


def test_what_the_product_gives_its_weight_is_added() -> None:
    counts = [2, 0, 3]
    rows = torch.randn(5, 4)
    weight, grad = torch.randn(3, 6, 4, requires_grad=True), torch.randn(5, 6)
    (expected,) = torch.autograd.grad(GroupedMM.apply(rows, weight, counts), weight, grad)
    before = torch.randn(3, 6, 4)
    main = before.clone()
    add_weight_grad_(main, grad, rows, torch.tensor([2, 2, 5]))
    torch.testing.assert_close(main, before + expected)
    assert torch.equal(main[1], before[1])


@pytest.mark.triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("counts", "C", "A"),
    [([0, 0], 30, 1), ([1], 1, 257), ([0, 300, 0, 1, 699, 0], 30, 257), ([70, 30], 257, 30), ([5, 0, 16], 128, 256)],
)
def test_added_weight_gradients_by_triton(counts: list[int], C: int, A: int, dtype: torch.dtype) -> None:
    R = sum(counts)
    grad, rows = draw(R + 3, C, dtype=dtype), draw(R + 3, A, dtype=dtype)
    grad[R:], rows[R:] = torch.nan, torch.nan  # rows beyond the last offset
    offsets = torch.tensor(counts, device=DEVICE).cumsum(0)
    before = draw(len(counts), C, A)
    found = Kernels("triton")(add_weight_grad_, before.clone(), grad, rows, offsets)
    expected = add_weight_grad_(before.double(), grad, rows, offsets)
    size = 1e-6 * max(float(expected.abs().max()), 1.0)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=size)
    assert all(torch.equal(found[e], before[e]) for e, count in enumerate(counts) if not count)
