"""The sums of a step's gradients over ranks, and gradients of earlier steps set aside meanwhile."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from overlap1f1b.plan import Node
from overlap1f1b.transport.lanes import Flight

BlockKey = tuple[int, int]
"""Numbers of stage and block."""


class GradientsAside:
    """Gradients of earlier steps, set aside so that a step's own can be reduced or dropped alone."""

    def __init__(self) -> None:
        self._before: dict[nn.Parameter, Tensor] = {}

    def take(self, parameters: Iterable[nn.Parameter]) -> None:
        """Set the gradients of these parameters aside."""
        self._before = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
        for parameter in self._before:
            parameter.grad = None

    def add_back(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Add the gradients that were set aside, of some parameters or all, to the step's."""
        with torch.no_grad():
            for parameter in list(self._before if parameters is None else parameters):
                if (grad := self._before.pop(parameter, None)) is not None:
                    parameter.grad = grad if parameter.grad is None else _added(grad, parameter.grad)


def _added(before: Tensor, grad: Tensor) -> Tensor:
    """Return the sum, in the earlier gradient's memory as autograd does: it may be part of an optimizer's buffer."""
    plain = type(before) is type(grad) is Tensor and before.layout is torch.strided and before.dtype is grad.dtype
    return before.add_(grad) if plain and before.is_contiguous() else grad + before


class Reduction:
    """Sums gradients of a step over ranks, under the rest of the step; this one sums nothing."""

    def __init__(self) -> None:
        self._aside = GradientsAside()
        self._flights: list[Flight[Any]] = []
        """Sums that were launched in this step."""

    def begin(self, order: Sequence[Node]) -> None:
        """Set gradients of earlier steps aside; all ranks that sum together launch in the order of this plan."""

    def launch(self, node: Node) -> Sequence[Flight[Any]]:
        """Carry out a ``reduce`` node: the last contribution of its block is in."""
        return ()

    def settle(self) -> None:
        """Wait until nothing is in flight, on a device only what is queued from now on, so that the groups can be used.

        LostRankError if a sum failed: a rank that went on would leave others to wait for it in the sum.
        """
        for flight in self._flights:
            flight.settle()

    def finish(self) -> None:
        """Wait, after the last node, until ``.grad`` holds the sums and the gradients of earlier steps."""
        for flight in self._flights:
            flight.wait()
        self.restore()

    def restore(self) -> None:
        """Add the gradients of earlier steps, also after a step that failed."""
        self._flights = []
        self._aside.add_back()
