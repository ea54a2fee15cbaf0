"""Positions of rows: one for each token and rank that has experts of it, and there one for each choice.

A *slot* is one choice: slot ``t·K + k`` is the k-th expert of token ``t``. :func:`place_rows` gives every (token, rank)
with a choice one row of the exchange, sorted by rank and then by token. A row has room for K choices: *spot*
``r·K + m`` is the m-th choice of row ``r``. :func:`place_slots` sorts the choices of received rows by expert; within an
expert they keep the order of their rows. Nothing is copied to the host.
"""

from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor


class Places(NamedTuple):
    """Maps between slots and rows to send."""

    order: Tensor  # ``[R]`` int64, the token of each row; −1 for a row without a token
    spots: Tensor  # ``[T, K]`` int64, the spot of each slot; −1 for a slot that was left out
    inverse: Tensor  # ``[T·K]`` int64, the row of each slot that is the first of its row, −1 for any other
    counts: Tensor  # ``[ranks, 1 + E / ranks]`` int64: rows, and choices of each expert, before any was left out


def place_rows(indices: Tensor, experts: int, ranks: int, room: int | None = None, choices: int = 0) -> Places:
    """Return the places of rows to send, of ``indices [T, K]`` int64; an index that names no expert is not counted.

    >>> order, spots, inverse, counts = place_rows(torch.tensor([[2, 3], [0, 3]]), 4, 2)
    >>> order.tolist(), spots.tolist(), inverse.tolist(), counts.tolist()
    ([1, 0, 1, -1], [[2, 3], [0, 4]], [1, -1, 0, 2], [[1, 1, 0], [2, 1, 2]])

    With a ``room`` each rank gets so many rows, of which the last may be without a token, and at most ``choices``:
    later tokens are left out first. Without one R is ``T·min(K, ranks)``, and rows without a token are the last.
    """
    indices = indices.contiguous()  # any strides, as of a transposed top-k
    (tokens, top_k), local = indices.shape, experts // ranks
    earlier = torch.ones(top_k, top_k, dtype=torch.bool, device=indices.device).tril(-1)
    rank = torch.where((indices >= 0) & (indices < experts), indices.div(local, rounding_mode="floor"), ranks)
    same = rearrange(rank, "T k -> T k 1") == rearrange(rank, "T j -> T 1 j")
    within = (same & earlier).sum(2)
    of_rank = indices.new_zeros(tokens, ranks + 1).scatter_add_(1, rank, torch.ones_like(rank))  # [T, ranks], choices
    there = (of_rank > 0).long()
    row = there.cumsum(0) - there
    rows = there.sum(0)
    counts = indices.new_zeros(ranks + 1, 1 + local)
    column = torch.where(rank < ranks, rank * (1 + local) + 1 + indices.remainder(local), ranks * (1 + local))
    counts.view(-1).scatter_add_(0, column.view(-1), torch.ones_like(column).view(-1))
    counts[:, 0] = rows
    kept = rank < ranks
    if room is None:
        start, size = rows.cumsum(0) - rows, tokens * min(top_k, ranks)
    else:
        start, size = torch.arange(ranks + 1, device=rows.device) * room, ranks * room
        before = (of_rank.cumsum(0) - of_rank).gather(1, rank) + within
        kept = kept & (row.gather(1, rank) < room) & (before < choices)
    place = (row + start).gather(1, rank)
    spots = (place * top_k + within).masked_fill_(~kept, -1)
    inverse = place.masked_fill(~kept | (within > 0), -1).view(-1)
    order = indices.new_full((size + 1,), -1)  # the last: for slots that are not the first of a row
    slot = torch.arange(tokens * top_k, device=order.device)
    order[inverse.masked_fill(inverse < 0, size)] = slot.div(top_k, rounding_mode="floor")
    return Places(order[:size], spots, inverse, counts[:ranks])


class Slots(NamedTuple):
    """Maps between the choices of received rows and rows sorted by expert."""

    order: Tensor  # ``[C]`` int64, the spot of each sorted row; −1 for a row without one, which are the last
    inverse: Tensor  # ``[R·K]`` int64, the sorted row of each spot; −1 for a spot without one
    ends: Tensor  # ``[E]`` int32, the end of each expert's rows


def place_slots(chosen: Tensor, experts: int, choices: int) -> Slots:
    """Return the choices in the order of their experts.

    >>> order, inverse, ends = place_slots(torch.tensor([[3, 1], [1, 2], [2, 0]], dtype=torch.int16), 3, 5)
    >>> order.tolist(), inverse.tolist(), ends.tolist()
    ([1, 2, 3, 4, 0], [4, 0, 1, 2, 3, -1], [2, 4, 5])

    Args:
        chosen: ``[R, K]`` int16, possibly a part of longer rows: one more than the expert of each spot, 0 for none.
        experts: E, those of this rank.
        choices: C, at least as many as there are.
    """
    # One more bin, after all others, is for spots without a choice.
    key = chosen.reshape(-1).long().sub_(1)
    key = torch.where((key >= 0) & (key < experts), key, experts)
    order = key.argsort(stable=True)
    every = torch.zeros(experts + 1, dtype=torch.int64, device=key.device)
    ends = every.scatter_add_(0, key, torch.ones_like(key))[:experts].cumsum(0)
    row = torch.arange(len(key), device=key.device)
    lost = row >= ends[-1]
    inverse = torch.empty_like(row)
    inverse[order] = row.masked_fill(lost, -1)
    return Slots(order.masked_fill_(lost, -1)[:choices], inverse, ends.to(torch.int32))
