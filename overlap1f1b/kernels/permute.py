"""Rows moved by number: a token's row for each rank that it is sent to, and there a row for each of its choices.

A sent row carries its choices: behind its H elements come K numbers of experts, int16, and at its end K weights with
all their bits, in whatever dtype. All rows begin at a multiple of 16 bytes, as wide loads and torch's grouped product
need. A gradient that comes back carries the weights' gradients in the same places, and no experts. The backwards are
the sums of :mod:`~overlap1f1b.kernels.combine`.
"""

from typing import NamedTuple, Self

import torch
from einops import rearrange
from torch import Tensor

ALIGNED = 16
"""Bytes of which the size of a sent row is a multiple."""


class Layout(NamedTuple):
    """What a sent row holds."""

    hidden: int  # H
    choices: int  # K
    weights: torch.dtype  # dtype of the weights
    width: int  # number of elements of a row, W
    between: tuple[int, int]  # where the experts' numbers begin, and the weights from the end, in steps of 2 bytes

    @classmethod
    def of(cls, tokens: Tensor, weights: Tensor, *, scales: int = 0) -> Self:
        """Return the layout of the rows of ``tokens [T, H]`` with ``weights [T, K]``.

        With ``scales``, a number of bytes, elements have a byte each, and these bytes behind them.
        """
        (hidden, choices), each = (tokens.shape[1], weights.shape[1]), weights.element_size()
        row = hidden + scales if scales else hidden * tokens.element_size()
        size = -(-(row + choices * (2 + each)) // ALIGNED) * ALIGNED
        return cls(hidden, choices, weights.dtype, size // tokens.element_size(), (row // 2, choices * each // 2))

    def opened(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return views of rows ``[R, W]``: the rows ``[R, H]``, their weights ``[R, K]``, and what lies between.

        >>> layout = Layout.of(torch.empty(3, 5), torch.empty(3, 2, dtype=torch.bfloat16))
        >>> [tuple(part.shape) for part in layout.opened(torch.empty(3, layout.width))]
        [(3, 5), (3, 2), (3, 4)]

        The last is int16 ``[R, ≥ K]``: the experts of the choices, plus one, and zeros.
        """
        (begin, end), weights = self.between, packed.view(self.weights)[:, -self.choices :]
        return packed[:, : self.hidden], weights, packed.view(torch.int16)[:, begin:-end]


def pack_rows(
    tokens: Tensor,
    indices: Tensor,
    weights: Tensor,
    order: Tensor | None,
    spots: Tensor | None,
    local: int,
    layout: Layout,
    partial: bool = True,
) -> Tensor:
    """Return the rows to send ``[R, W]`` of ``tokens [T, H]``, experts ``[T, K]`` int64 and their weights ``[T, K]``.

    ``order [R]`` int64 is the token of each row, −1, if ``partial``, for zeros, None for a row of each token; ``spots
    [T, K]`` int64 the spot of each slot, −1 for none; ``local`` the experts of a rank.
    """
    packed = tokens.new_empty(len(tokens) if order is None else len(order), layout.width)
    rows, factors, chosen = layout.opened(packed)
    chosen.zero_()
    if order is None or spots is None:
        rows.copy_(tokens)
        factors.copy_(weights)
        numbers = (indices + 1).masked_fill_((indices < 0) | (indices >= local), 0)
        chosen[:, : layout.choices] = numbers
        return packed
    if partial:
        rows.copy_(take_rows(tokens, order, True))
    else:
        torch.index_select(tokens, 0, order, out=rows)
    room = len(order) * layout.choices
    spot = spots.masked_fill(spots < 0, room).view(-1)  # the last: for slots without a spot
    for part, values in ((factors, weights), (chosen[:, : layout.choices], indices.remainder(local).add_(1))):
        every = torch.zeros(room + 1, dtype=part.dtype, device=part.device)
        every.scatter_(0, spot, values.reshape(-1).to(part.dtype))
        part.copy_(every[:room].view_as(part))
    return packed


def expand_rows(packed: Tensor, order: Tensor, inverse: Tensor, layout: Layout, padded: bool) -> tuple[Tensor, Tensor]:
    """Return the rows ``[C, H]`` of each choice, sorted by expert, and their weights ``[C]``, from ``[R, W]``.

    ``order [C]`` int64 is the spot of each choice, −1, if ``padded``, for zeros; ``inverse [R·K]`` the reverse, −1 for
    none.
    """
    rows, weights, _ = layout.opened(packed)
    factors = take_rows(rearrange(weights, "R K -> (R K) 1"), order, padded).squeeze(1)
    return spread_rows(rows, order, inverse, layout.choices, padded), factors


def spread_rows(rows: Tensor, order: Tensor, inverse: Tensor, width: int, padded: bool) -> Tensor:
    """Return :func:`expand_rows` of ``rows [R, H]`` without weights; ``width`` is K."""
    row = order.div(width, rounding_mode="floor")
    return take_rows(rows, row.masked_fill_(order < 0, -1) if padded else row, padded)


def take_rows(rows: Tensor, index: Tensor, partial: bool = False) -> Tensor:
    """Return ``rows[index]``, of ``rows [N, H]`` and ``index [R]`` int64, with zeros for −1, if ``partial``.

    >>> take_rows(torch.tensor([[1.0], [2.0]]), torch.tensor([1, -1, 0]), True).tolist()
    [[2.0], [0.0], [1.0]]
    """
    if not partial:
        return rows.index_select(0, index)
    if not rows.shape[0]:
        return rows.new_zeros(index.shape[0], rows.shape[1])
    return rows.index_select(0, index.clamp(min=0)).masked_fill_((index < 0).unsqueeze(1), 0)
