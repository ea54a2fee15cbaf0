"""What one microbatch must remember of one call of the experts: which row went where."""

from __future__ import annotations

import math
from datetime import timedelta
from functools import cached_property

import torch
from torch import Tensor

from overlap1f1b.kernels.choice import Kernels, run
from overlap1f1b.kernels.combine import spread_grad, sum_rows
from overlap1f1b.kernels.grouped_mm import ExpertRows
from overlap1f1b.kernels.permute import OpenRows, opened, put_rows, spread_rows, spread_weighted, take_rows
from overlap1f1b.kernels.slots import invert, pack_slots, place_slots, sort_slots
from overlap1f1b.transport.exchange import EqualSplits
from overlap1f1b.transport.streams import HostCopy


class Route:
    """Splits and permutations of ``indices [T, K]`` over E experts, which are spread evenly over the ranks.

    The way of a row: token → slot order (sorted by expert, so by rank) → exchange → grouped by local expert → experts
    → back. :meth:`arrive` must have been called with the received counts before rows are grouped.

    By default it is exact: every rank sends as many rows as there are, so the host must know how many. With a
    ``capacity`` every rank sends every other the same number, ``⌈capacity · T · K / ranks⌉``, filled up with zeros:
    nothing waits for the host, and ranks must have equally many tokens. Rows that find no room are left out, and
    :attr:`dropped` says so.

    Args:
        indices: ``[T, K]`` int64.
        experts: E.
        ranks: Ranks that share the experts.
        kernels: What rows are moved by; torch by default.
        capacity: Room for rows, as a multiple of what each rank would be sent if all were sent alike; None for exact.

    Attributes:
        keeps_returned: Whether the backward of :meth:`aggregate` needs the rows that came back.
        counts: ``[E]`` int64, rows that are sent to each expert.
        dropped: ``[E]`` int64, rows that found no room; None where all do.
        host: The counts on their way to the host, if an exchange has sent them there.

    Raises:
        ValueError: ``indices`` name an expert that is none. On CUDA that is an assertion of the device.
    """

    keeps_returned = True

    def __init__(
        self,
        indices: Tensor,
        experts: int,
        ranks: int,
        kernels: Kernels | None = None,
        *,
        capacity: float | None = None,
    ) -> None:
        self.top_k, self.ranks, self.kernels = indices.shape[1], ranks, kernels
        self.dropped: Tensor | None = None
        self.host: HostCopy | None = None
        self.send: list[int] = []
        self.receive: list[int] = []
        self._arrived: Tensor | None = None  # rows by source and local expert
        self._counted: list[list[int]] | None = None  # the same on the host, where it must know
        if not indices.is_cuda:
            _check(indices, experts)
        if capacity is not None:
            room = min(math.ceil(capacity * indices.numel() / ranks), indices.numel())
            packing = pack_slots(indices, experts, ranks, room, kernels)
            self.order, self.inverse, self.counts, self.dropped = packing
            self.send = self.receive = EqualSplits([room] * ranks)
        elif not indices.is_cuda and (kernels is None or not kernels.uses_triton(place_slots, indices, experts)):
            self.order, self.counts = sort_slots(indices, experts)
            self.inverse = invert(self.order)
        else:
            self.order, self.inverse, self.counts = run(kernels, place_slots, indices, experts)

    @property
    def padded(self) -> bool:
        """Whether what is sent has rows that are none."""
        return self.dropped is not None

    def arrive(self, counts: Tensor, timeout: timedelta | None = None) -> None:
        """Takes the received ``counts [ranks, E / ranks]``; what the host must know of them it waits for here."""
        self._arrived = counts
        if self.padded:
            return
        if self.ranks == 1 and self.host is None:
            if counts.is_cuda:  # without a wait: the device itself objects
                torch._assert_async(self.counts.sum() == self.order.shape[0], "indices name an expert that is none")
            self.send = self.receive = [self.order.shape[0]]
            return
        sent, received = (self.counts, counts) if self.host is None else self.host.read(timeout)
        self.send = sent.view(self.ranks, -1).sum(1).tolist()
        if sum(self.send) != self.order.shape[0]:  # a slot without an expert has no row: nothing would say so
            raise ValueError(f"indices name an expert that is none; allowed: 0 to {self.counts.numel() - 1}")
        self._counted = received.tolist()
        self.receive = [sum(rows) for rows in self._counted]
        self.host = None

    @property
    def expert_rows(self) -> ExpertRows:
        """Received rows of each local expert."""
        assert self._arrived is not None
        counted = self._counted
        host = None if counted is None else [sum(rows) for rows in zip(*counted, strict=True)]
        return ExpertRows(self._arrived.sum(0), host, padded=self.padded)

    @cached_property
    def _regroup(self) -> Tensor | None:
        """Received rows lie by (source, expert), experts want them by (expert, source): whence each comes, or −1."""
        assert self._arrived is not None
        ranks, local = self._arrived.shape
        if (ranks == 1 or local == 1) and not self.padded:
            return None
        rows = sum(self.receive)
        # Where the rows of each (source, expert) begin, and where those of each (expert, source) end.
        within = self._arrived.cumsum(1) - self._arrived
        if self.padded:
            first = torch.arange(ranks, device=within.device) * self.receive[0]
        else:
            each = self._arrived.sum(1)
            first = each.cumsum(0) - each
        begins, ends = (within + first.unsqueeze(1)).t().reshape(-1), self._arrived.t().reshape(-1).cumsum(0)
        sizes = self._arrived.t().reshape(-1)
        row = torch.arange(rows, device=ends.device)
        part = torch.searchsorted(ends, row, right=True)
        lost = part == len(ends)
        part = part.clamp_(max=len(ends) - 1)
        return (begins[part] + row - (ends - sizes)[part]).masked_fill_(lost, -1)

    @cached_property
    def _ungroup(self) -> Tensor:
        """Of a padded route: where each received row lies among the grouped ones, or −1."""
        index = self._regroup
        assert index is not None
        rows = len(index)
        places = index.new_full((rows + 1,), -1)  # the last takes what came from nowhere
        places[index.masked_fill(index < 0, rows)] = torch.arange(rows, device=index.device)
        return places[:rows]

    def gather(self, tokens: Tensor, weights: Tensor) -> Tensor:
        """``[T, H] → [rows, H]``, the rows to send."""
        return run(self.kernels, spread_rows, tokens, self.order, self.inverse, self.top_k, self.padded)

    def gather_backward(self, grad_rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """``[rows, H] → [T, H]``, and the gradient ``[T, K]`` of the weights where rows carry them, else None."""
        return run(self.kernels, sum_rows, grad_rows, self.inverse, self.top_k, None, self.padded), None

    def group(self, rows: Tensor) -> Tensor:
        """Received rows ``[R, H]`` grouped by expert."""
        return rows if self._regroup is None else run(self.kernels, take_rows, rows, self._regroup, self.padded)

    def ungroup(self, rows: Tensor) -> Tensor:
        """Grouped rows ``[R, H]`` as they were received."""
        if self._regroup is None:
            return rows
        if self.padded:
            return run(self.kernels, take_rows, rows, self._ungroup, True)
        return run(self.kernels, put_rows, rows, self._regroup)

    def aggregate(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Returned rows ``[rows, H]`` and ``weights [T, K]`` → ``[T, H]``."""
        return run(self.kernels, sum_rows, rows, self.inverse, self.top_k, weights, self.padded)

    def aggregate_backward(self, grad: Tensor, rows: Tensor | None, weights: Tensor) -> tuple[Tensor, Tensor | None]:
        """Gradients ``[rows, H]`` of what came back and, unless rows have carried them, ``[T, K]`` of the weights."""
        assert rows is not None
        return run(self.kernels, spread_grad, grad, rows, self.order, self.inverse, weights, self.padded)


def _check(indices: Tensor, experts: int) -> None:
    if indices.numel() and not ((lowest := int(indices.amin())) >= 0 and (highest := int(indices.amax())) < experts):
        wrong = lowest if lowest < 0 else highest
        raise ValueError(f"indices name expert {wrong}; allowed: 0 to {experts - 1}")


class WeightedRoute(Route):
    """A :class:`Route` that sends ``[rows, W]``: H elements and, behind them, the row's weight.

    What comes back is summed as it is, so the backward of that sum is a permutation, and the rows that came back need
    not be kept. The gradient of a weight comes back behind that of its row. No exchange is added; each row sent to the
    experts and each of their gradients is 16 bytes longer (up to 31 where rows are no multiple of 16).
    """

    keeps_returned = False

    def gather(self, tokens: Tensor, weights: Tensor) -> Tensor:
        self._hidden, self._dtype = tokens.shape[1], weights.dtype
        return run(self.kernels, spread_weighted, tokens, weights, self.order, self.inverse, self.padded)

    def gather_backward(self, grad_rows: Tensor) -> tuple[Tensor, Tensor | None]:
        rows, weights = opened(grad_rows, self._hidden, self._dtype)
        of_slots = run(self.kernels, take_rows, weights.unsqueeze(1), self.inverse, self.padded)
        return super().gather_backward(rows)[0], of_slots.view(-1, self.top_k)

    def opened(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Grouped rows ``[R, W]`` as ``[R, H]`` and their weights ``[R]``, in autograd."""
        of_rows, weights = OpenRows.apply(rows, self._hidden, self._dtype)
        return of_rows, weights

    def aggregate(self, rows: Tensor, weights: Tensor) -> Tensor:
        return run(self.kernels, sum_rows, rows, self.inverse, self.top_k, None, self.padded)

    def aggregate_backward(self, grad: Tensor, rows: Tensor | None, weights: Tensor) -> tuple[Tensor, Tensor | None]:
        return run(self.kernels, spread_rows, grad, self.order, self.inverse, self.top_k, self.padded), None
