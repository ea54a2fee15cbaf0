"""A route whose rows carry their routing weights to the experts, which apply them."""

from __future__ import annotations

from torch import Tensor

from overlap1f1b.kernels.choice import run
from overlap1f1b.kernels.combine import sum_rows
from overlap1f1b.kernels.permute import OpenRows, opened, spread_rows, spread_weighted
from overlap1f1b.kernels.take import take_rows
from overlap1f1b.moe.route import Route


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
