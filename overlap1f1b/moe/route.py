"""What one microbatch must remember of one call of the experts: which row went where."""

from __future__ import annotations

from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

from overlap1f1b.kernels.permute import (
    aggregate_rows,
    aggregate_rows_backward,
    gather_rows,
    gather_rows_backward,
    sort_slots,
)


class Route:
    """Splits and permutations of ``indices [T, K]`` over E experts, which are spread evenly over the ranks.

    The way of a row: token → slot order (sorted by expert, so by rank) → exchange → grouped by local expert → experts
    → back. :meth:`arrive` must have been called with the received counts before rows are grouped.

    Args:
        indices: ``[T, K]`` int64.
        experts: E.
        ranks: Ranks that share the experts.

    Raises:
        ValueError: ``indices`` name an expert that is none.
    """

    def __init__(self, indices: Tensor, experts: int, ranks: int) -> None:
        self.top_k = indices.shape[1]
        # Counting has to look at all indices anyway: its result is longer than E, or it refuses negative ones. So what
        # is wrong is seen without a look at the values of its own, for which a GPU would have to be waited for.
        try:
            self.order, self.counts = sort_slots(indices, experts)
        except RuntimeError:
            if (lowest := int(indices.amin())) >= 0:
                raise
            raise ValueError(f"indices name expert {lowest}; allowed: 0 to {experts - 1}") from None
        if len(self.counts) > experts:
            raise ValueError(f"indices name expert {len(self.counts) - 1}; allowed: 0 to {experts - 1}")
        self.send = self.counts.view(ranks, -1).sum(1).tolist()
        self.receive: list[int] = []
        self._received: list[list[int]] = []  # rows by source and local expert

    def arrive(self, counts: Tensor) -> None:
        """Takes the received ``counts [ranks, E / ranks]`` and copies them to the host."""
        self._received = counts.tolist()
        self.receive = [sum(rows) for rows in self._received]

    @property
    def expert_rows(self) -> list[int]:
        """Received rows of each local expert."""
        return [sum(rows) for rows in zip(*self._received, strict=True)]

    @cached_property
    def _regroup(self) -> Tensor | None:
        """Received rows lie by (source, expert); experts want them by (expert, source)."""
        ranks, local = len(self._received), len(self._received[0])
        if ranks == 1 or local == 1:
            return None
        rows = torch.arange(sum(self.receive), device=self.order.device).split(list(chain(*self._received)))
        return torch.cat(list(chain.from_iterable(rows[expert::local] for expert in range(local))))

    def gather(self, tokens: Tensor) -> Tensor:
        """``[T, H] → [T·K, H]``, the rows to send."""
        return gather_rows(tokens, self.order, self.top_k)

    def gather_backward(self, grad_rows: Tensor) -> Tensor:
        """``[T·K, H] → [T, H]``."""
        return gather_rows_backward(grad_rows, self.order, self.top_k)

    def group(self, rows: Tensor) -> Tensor:
        """Received rows ``[R, H]`` grouped by expert."""
        return rows if self._regroup is None else rows.index_select(0, self._regroup)

    def ungroup(self, rows: Tensor) -> Tensor:
        """Grouped rows ``[R, H]`` as they were received."""
        if self._regroup is None:
            return rows
        return torch.empty_like(rows).index_copy_(0, self._regroup, rows)

    def aggregate(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Returned rows ``[T·K, H]`` and ``weights [T, K]`` → ``[T, H]``."""
        return aggregate_rows(rows, self.order, weights)

    def aggregate_backward(self, grad: Tensor, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the returned rows and of the weights."""
        return aggregate_rows_backward(grad, rows, self.order, weights)
