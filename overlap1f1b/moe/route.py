"""What one microbatch must remember of one call of the experts: which row went where."""

from __future__ import annotations

from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

from overlap1f1b.kernels.choice import Kernels, run
from overlap1f1b.kernels.combine import aggregate_rows, aggregate_rows_backward
from overlap1f1b.kernels.permute import gather_rows, gather_rows_backward
from overlap1f1b.kernels.slots import invert, place_slots, sort_slots
from overlap1f1b.kernels.take import put_rows, take_rows


class Route:
    """Splits and permutations of ``indices [T, K]`` over E experts, which are spread evenly over the ranks.

    The way of a row: token → slot order (sorted by expert, so by rank) → exchange → grouped by local expert → experts
    → back. :meth:`arrive` must have been called with the received counts before rows are grouped.

    Args:
        indices: ``[T, K]`` int64.
        experts: E.
        ranks: Ranks that share the experts.
        kernels: What permutations and sums run by; torch by default.

    Raises:
        ValueError: ``indices`` name an expert that is none.
    """

    def __init__(self, indices: Tensor, experts: int, ranks: int, kernels: Kernels | None = None) -> None:
        self.top_k, self.kernels = indices.shape[1], kernels
        if kernels is not None and kernels.uses_triton(place_slots, indices, experts):
            self.order, self.inverse, self.counts = kernels(place_slots, indices, experts)
        else:
            # Counting has to look at all indices anyway: its result is longer than E, or it refuses negative ones. So
            # what is wrong is seen without a look at values of its own, for which a GPU would have to be waited for.
            try:
                self.order, self.counts = sort_slots(indices, experts)
            except RuntimeError:
                _refuse(indices, experts)
                raise
            if len(self.counts) > experts:
                _refuse(indices, experts)
            self.inverse = invert(self.order)
        self.send = self.counts.view(ranks, -1).sum(1).tolist()
        if sum(self.send) < indices.numel():  # Triton's kernels count only what names an expert
            _refuse(indices, experts)
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
        return gather_rows(tokens, self.order, self.top_k, self.inverse, self.kernels)

    def gather_backward(self, grad_rows: Tensor) -> Tensor:
        """``[T·K, H] → [T, H]``."""
        return gather_rows_backward(grad_rows, self.order, self.top_k, self.inverse, self.kernels)

    def group(self, rows: Tensor) -> Tensor:
        """Received rows ``[R, H]`` grouped by expert."""
        return rows if self._regroup is None else run(self.kernels, take_rows, rows, self._regroup)

    def ungroup(self, rows: Tensor) -> Tensor:
        """Grouped rows ``[R, H]`` as they were received."""
        return rows if self._regroup is None else run(self.kernels, put_rows, rows, self._regroup)

    def aggregate(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Returned rows ``[T·K, H]`` and ``weights [T, K]`` → ``[T, H]``."""
        return aggregate_rows(rows, self.order, weights, self.inverse, self.kernels)

    def aggregate_backward(self, grad: Tensor, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the returned rows and of the weights."""
        return aggregate_rows_backward(grad, rows, self.order, weights, self.inverse, self.kernels)


def _refuse(indices: Tensor, experts: int) -> None:
    """Raises if an index names no expert."""
    lowest, highest = int(indices.amin()), int(indices.amax())
    if lowest < 0 or highest >= experts:
        raise ValueError(f"indices name expert {lowest if lowest < 0 else highest}; allowed: 0 to {experts - 1}")
