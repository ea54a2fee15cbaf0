"""Sums gradients outside the experts over the ranks that share the experts."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from overlap1f1b.engine.lanes import Flight, Lane
from overlap1f1b.engine.stage import Stage
from overlap1f1b.moe.exchange import Transfer
from overlap1f1b.plan import Node


class Reducer:
    """One reduction a block, launched when the block's last contribution is in, so that it travels under the rest.

    Gradients that were there before the step are not reduced again: :meth:`begin` sets them aside.
    """

    def __init__(self, stage: Stage, group: dist.ProcessGroup, lane: Lane) -> None:
        self.stage, self.group, self.lane = stage, group, lane
        self._before: dict[nn.Parameter, Tensor] = {}
        self._flights: list[tuple[list[nn.Parameter], list[Tensor], Flight]] = []

    def begin(self) -> None:
        """Sets aside the gradients of earlier steps."""
        parameters = [p for block in range(len(self.stage.blocks)) for p in self.stage.reduced_parameters(block)]
        self._before = {p: p.grad for p in parameters if p.grad is not None}
        self._flights = []
        for parameter in self._before:
            parameter.grad = None

    def launch(self, node: Node) -> Flight:
        """Starts the reduction of a block."""
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in self.stage.reduced_parameters(node.block):
            if parameter.grad is None:  # no token of this rank came by; another rank's may have
                parameter.grad = torch.zeros_like(parameter)
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for parameters in by_dtype.values():
            grads = [p.grad for p in parameters if p.grad is not None]
            flight = self.lane.launch(node, partial(self._post, _flatten_dense_tensors(grads)))
            self._flights.append((parameters, grads, flight))
        return flight

    def _post(self, flat: Tensor) -> Transfer:
        work = dist.all_reduce(flat, group=self.group, async_op=True)
        assert work is not None
        return Transfer(flat, [work])

    def settle(self) -> None:
        """Waits until nothing is under way, so that the group can be used for something else."""
        for _, _, flight in self._flights:
            flight.drained(self.lane.timeout.total_seconds())

    def finish(self) -> None:
        """Waits for all reductions and adds what :meth:`begin` set aside."""
        for parameters, grads, flight in self._flights:
            reduced = _unflatten_dense_tensors(flight.wait(), grads)
            for parameter, grad in zip(parameters, reduced, strict=True):
                assert parameter.grad is not None
                parameter.grad.copy_(grad)
        for parameter, grad in self._before.items():
            parameter.grad = grad if parameter.grad is None else grad + parameter.grad
        self._before, self._flights = {}, []
