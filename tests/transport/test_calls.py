"""Exchanges in plain autograd, and sizes that cannot be."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap1f1b.transport.calls import exchange, splits_of
from tests.ranks import over


@over(2)
def test_rows_and_their_gradients_travel_without_an_engine(rank: int, size: int) -> None:
    """Tensors of one call go by the same sizes; each rank sends one row to rank 0 and the others to rank 1."""
    group: Any = dist.group.WORLD
    sent = (torch.arange(3.0) + 10 * rank).requires_grad_()
    first, second = exchange((sent, 2 * sent), [1, 2], [1, 1] if rank == 0 else [2, 2], group)
    wanted = torch.tensor([0.0, 10.0] if rank == 0 else [1.0, 2.0, 11.0, 12.0])
    assert torch.equal(first, wanted), first
    assert torch.equal(second, 2 * wanted), second
    ((first + second).sum() * (1 + rank)).backward()
    assert sent.grad.tolist() == [3.0, 6.0, 6.0], sent.grad
    (even,) = exchange((sent[:2],), None, None, group)
    assert even.tolist() == [0.0 + rank, 10.0 + rank], even


@pytest.mark.parametrize(
    ("send", "receive", "said"),
    [
        ([1, 2], [1, 1], r"send=\[1, 2\] for 4 rows; allowed: sizes whose sum is 4"),
        ([4], [2, 2], r"send=\[4\]; allowed: a size of 0 or more for each of 2 ranks"),
        ([2, 2], [5, -1], r"receive=\[5, -1\]; allowed: a size of 0 or more"),
    ],
)
def test_sizes_that_cannot_be_are_named(send: list[int], receive: list[int], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}"):
        splits_of(4, send, receive, 2)
    with pytest.raises(ValueError, match=r"^send=None for 3 rows and 2 ranks; allowed: a multiple, or sizes$"):
        splits_of(3, None, receive, 2)


def test_a_rank_alone_exchanges_with_itself() -> None:
    rows = torch.ones(3, requires_grad=True)
    assert exchange(rows, [3], [3], None) is rows
    with pytest.raises(ValueError, match=r"^send=\[2\]"):
        exchange(rows, [2], [3], None)
    with pytest.raises(ValueError, match=r"^send=\[3\], receive=\[2\]: a rank's rows to itself differ; allowed"):
        exchange(rows, [3], [2], None)


def test_tensors_of_other_lengths_do_not_travel_together() -> None:
    allowed = "allowed: one or several \\[R, ...\\], of as many rows$"
    for tensors, found in (
        ((torch.ones(2), torch.ones(3)), "\\[2\\], \\[3\\]"),
        (torch.ones(()), "\\[\\]"),
        ("rows", "'rows'"),
        ((), ""),
    ):
        with pytest.raises(ValueError, match=f"^tensors {found}; {allowed}"):
            exchange(tensors, None, None, None)  # type: ignore[type-var]


@pytest.mark.parametrize("send", [[2.0], 2, "2", [1, 1], [-2]])
def test_sizes_of_another_kind_are_named(send: Any) -> None:
    message = f"send={send!r}; allowed: a size of 0 or more for each of 1 ranks"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        exchange(torch.ones(2), send, None, None)


def test_a_group_of_another_kind_is_named() -> None:
    with pytest.raises(ValueError, match=r"^group='ep'; allowed: ProcessGroup or None$"):
        exchange(torch.ones(2), None, None, "ep")  # type: ignore[arg-type]
