"""The route of rows in one call of experts by one microbatch: each row's way to its expert and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from functools import cached_property

import torch
from torch import Tensor

from overlap1f1b.kernels.choice import Kernels
from overlap1f1b.kernels.combine import spread_grad, sum_rows
from overlap1f1b.kernels.grouped_mm import ExpertRows
from overlap1f1b.kernels.permute import OpenRows, opened, spread_rows, spread_weighted, take_rows
from overlap1f1b.kernels.slots import Groups, group_places, invert, pack_slots, place_slots, sort_slots
from overlap1f1b.transport.calls import Splits
from overlap1f1b.transport.exchange import EqualSplits
from overlap1f1b.transport.streams import Failed, nobody_failed


class Route(Splits):
    """Splits and permutations of the rows for ``indices [T, K]`` over E experts, spread evenly over the ranks.

    A row goes from its token into slot order (sorted by expert, and so by rank), through the exchange, into groups by
    local expert, through the experts, and back. Before rows are grouped, :meth:`arrive` takes the received counts.

    Without a capacity every rank sends as many rows as were routed, and the host must know their number. With a
    ``capacity`` every rank sends the same number of rows to every rank, ``⌈capacity · T · K / ranks⌉``, padded with
    zeros: then nothing waits for the host, but all ranks must have equally many tokens. Rows without room are left out
    and counted in :attr:`dropped`.

    Args:
        indices: ``[T, K]`` int64.
        experts: E.
        ranks: Ranks that share the experts.
        kernels: Choice between Triton and torch.
        capacity: Largest number of rows for a rank, as a multiple of an even share; None for exact sizes.

    Attributes:
        keeps_returned: Whether the backward of :meth:`aggregate` needs the returned rows.
        tokens: T.
        top_k: K.
        counts: ``[E]`` int64, rows sent to each expert.
        dropped: ``[E]`` int64, rows without room; None without a capacity.

    Raises:
        ValueError: ``indices`` name an unknown expert. On a GPU a device-side assertion fails instead.
    """

    keeps_returned = True
    counts: Tensor

    def __init__(
        self,
        indices: Tensor,
        experts: int,
        ranks: int,
        kernels: Kernels,
        *,
        capacity: float | None = None,
    ) -> None:
        super().__init__((), ())
        self.tokens, self.top_k = indices.shape
        self.ranks, self.kernels, self.capacity = ranks, kernels, capacity
        self.dropped: Tensor | None = None
        self._arrived: Tensor | None = None  # rows by source and local expert
        self._counted: list[list[int]] | None = None  # a copy on the host, if the host must know
        if indices.is_cpu:
            _check(indices, experts)
        if capacity is not None:
            room = min(math.ceil(capacity * indices.numel() / ranks), indices.numel())
            packing = pack_slots(indices, experts, ranks, room, kernels)
            self.order, self.inverse, self.counts, self.dropped = packing
            self.send = self.receive = EqualSplits([room] * ranks)
            self.counts_first = False
        elif indices.is_cpu and not kernels.uses_triton(place_slots, indices, experts):
            self.order, self.counts = sort_slots(indices, experts)
            self.inverse = invert(self.order)
        else:
            self.order, self.inverse, self.counts = kernels(place_slots, indices, experts)

    @property
    def padded(self) -> bool:
        """Whether sent rows include padding."""
        return self.dropped is not None

    @property
    def told(self) -> Tensor:
        """The counts, and for rows of equal sizes on a CPU a column of T: gloo aborts the process if sizes differ."""
        if not self.padded or not self.counts.is_cpu:
            return self.counts
        each = self.counts.view(self.ranks, -1)
        return torch.cat([each, each.new_full((self.ranks, 1), self.tokens)], 1)

    def arrive(self, counts: Tensor, timeout: timedelta | None = None, failed: Failed = nobody_failed) -> None:
        """Take the received ``counts [ranks, E / ranks]``, as told; wait for them if the host must know sizes.

        Raises:
            ValueError: Under a capacity, ranks have other numbers of tokens; or ``indices`` name an unknown expert.
        """
        if self.padded and counts.is_cpu:
            self.check_tokens(counts[:, -1].tolist())
            counts = counts[:, :-1]
        self._arrived = counts
        if self.padded:
            return
        if self.ranks == 1 and self.host is None:
            if self.tokens and not counts.is_cpu:  # the device looks if the last row has a slot: no wait of the host
                torch._assert_async(self.order[-1] >= 0, "indices name an expert that is none")
            self.send = self.receive = [self.order.shape[0]]
            return
        sent, received = (self.counts, counts) if self.host is None else self.host.read(timeout, failed)
        self.send = sent.view(self.ranks, -1).sum(1).tolist()
        if sum(self.send) != self.order.shape[0]:  # a slot without a row would be lost silently
            raise ValueError(f"indices name an expert that is none; allowed: 0 to {self.counts.numel() - 1}")
        self._counted = received.tolist()
        self.receive = [sum(rows) for rows in self._counted]
        self.host = None

    def check_tokens(self, every: Sequence[int]) -> None:
        """Raise ValueError if ranks have other numbers of tokens: they would wait for rows that nobody sends."""
        if len(set(every)) > 1:
            raise ValueError(
                f"capacity={self.capacity:g} with {every} tokens on the ranks that share the experts; "
                "allowed: equally many, or capacity=None"
            )

    @property
    def expert_rows(self) -> ExpertRows:
        """Number of received rows of each local expert."""
        arrived, counted = self._arrived, self._counted
        assert arrived is not None
        host = None if counted is None else [sum(rows) for rows in zip(*counted, strict=True)]
        if self._groups is not None:
            return ExpertRows(self._groups.ends, host, padded=self.padded)
        counts = arrived[0] if len(arrived) == 1 else arrived.sum(0)
        return ExpertRows(counts.cumsum(0, dtype=torch.int32), host)

    @property
    def regroups(self) -> bool:
        """Whether rows are received in another order than by expert, or with padding."""
        return self._groups is not None

    @cached_property
    def _groups(self) -> Groups | None:
        arrived = self._arrived
        assert arrived is not None
        if 1 in arrived.shape and not self.padded:
            return None
        return self.kernels(group_places, arrived, sum(self.receive), self.padded)

    def gather(self, tokens: Tensor, weights: Tensor) -> Tensor:
        """Return the rows to send ``[rows, H]`` of ``tokens [T, H]``."""
        return self.kernels(spread_rows, tokens, self.order, self.inverse, self.top_k, self.padded)

    def gather_backward(self, grad_rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the gradient ``[T, H]`` of the tokens, and ``[T, K]`` of the weights if rows carry them, else None."""
        return self.kernels(sum_rows, grad_rows, self.inverse, self.top_k, None, self.padded), None

    def group(self, rows: Tensor) -> Tensor:
        """Group received rows ``[R, H]`` by expert."""
        return rows if self._groups is None else self.kernels(take_rows, rows, self._groups.order, self.padded)

    def ungroup(self, rows: Tensor) -> Tensor:
        """Return grouped rows ``[R, H]`` to the order in which they were received."""
        return rows if self._groups is None else self.kernels(take_rows, rows, self._groups.inverse, self.padded)

    def aggregate(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Sum returned rows ``[rows, H]`` by ``weights [T, K]`` to ``[T, H]``."""
        return self.kernels(sum_rows, rows, self.inverse, self.top_k, weights, self.padded)

    def aggregate_backward(self, grad: Tensor, rows: Tensor | None, weights: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return gradients ``[rows, H]`` of returned rows and ``[T, K]`` of weights, None if rows carry them."""
        assert rows is not None
        return self.kernels(spread_grad, grad, rows, self.order, self.inverse, weights, self.padded)


def _check(indices: Tensor, experts: int) -> None:
    if indices.numel() and not ((lowest := int(indices.amin())) >= 0 and (highest := int(indices.amax())) < experts):
        wrong = lowest if lowest < 0 else highest
        raise ValueError(f"indices name expert {wrong}; allowed: 0 to {experts - 1}")


class WeightedRoute(Route):
    """A :class:`Route` whose rows carry their weights to the experts: ``[rows, W]``, H elements and then the weight.

    Returned rows are summed without weights. So the backward of the sum is a permutation, and the returned rows need
    not be kept. The gradient of a weight returns at the end of its row's gradient. There is no additional exchange;
    each row sent to the experts, and its gradient, is 16 bytes longer (up to 31 bytes if a row's size is not a multiple
    of 16).
    """

    keeps_returned = False

    def gather(self, tokens: Tensor, weights: Tensor) -> Tensor:
        self._hidden, self._dtype = tokens.shape[1], weights.dtype
        return self.kernels(spread_weighted, tokens, weights, self.order, self.inverse, self.padded)

    def gather_backward(self, grad_rows: Tensor) -> tuple[Tensor, Tensor | None]:
        rows, weights = opened(grad_rows, self._hidden, self._dtype)
        of_slots = self.kernels(take_rows, weights.unsqueeze(1), self.inverse, self.padded)
        return super().gather_backward(rows)[0], of_slots.view(-1, self.top_k)

    def opened(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Split grouped rows ``[R, W]`` into ``[R, H]`` and their weights ``[R]``, in autograd."""
        of_rows, weights = OpenRows.apply(rows, self._hidden, self._dtype)
        return of_rows, weights

    def aggregate(self, rows: Tensor, weights: Tensor) -> Tensor:
        return self.kernels(sum_rows, rows, self.inverse, self.top_k, None, self.padded)

    def aggregate_backward(self, grad: Tensor, rows: Tensor | None, weights: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.kernels(spread_rows, grad, self.order, self.inverse, self.top_k, self.padded), None
