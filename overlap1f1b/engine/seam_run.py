"""One call of experts by one microbatch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from overlap1f1b.engine.forward import SeamCall
from overlap1f1b.engine.weights import WeightQueue
from overlap1f1b.moe.exchange import Exchange
from overlap1f1b.moe.experts import Experts


class SeamRun:
    """One call of experts by one microbatch."""

    def __init__(self, call: SeamCall, exchange: Exchange, capacity: float | None = None) -> None:
        assert isinstance(call.experts, Experts)
        self.experts, self.exchange = call.experts, exchange
        self.tokens: Tensor | None = call.tokens
        self.weights, self.state, self.dtype = call.weights, call.state, call.tokens.dtype
        self.queue = WeightQueue()
        with torch.no_grad():
            experts = self.experts
            self.route = experts.route(call.indices, exchange.ranks, capacity=capacity)
            self.rows: Tensor | None = self.route.gather(call.tokens.detach(), call.weights.detach())
            # What rows look like on their way back, and on their way to the experts.
            hidden, width = call.tokens.shape[1], self.rows.shape[1]
            self.back = call.tokens.new_empty(0, hidden)
            self.outward = self.back if width == hidden else call.tokens.new_empty(0, width)
        self.result: GradientEdge | None = None  # the experts' output, whose values have been sent away
        self.result_dtype = self.dtype
        self.leaf: Tensor | None = None  # their input
        self.returned: Tensor | None = None  # what came back, if its sum needs it for its backward
        self.y: Tensor | None = None
        self.version = 0  # of y's values

    def aggregate(self, returned: Tensor) -> Tensor:
        """The result of the call, from the rows that came back; a leaf."""
        self.y = self.route.aggregate(returned, self.weights.detach()).requires_grad_(self.state.grad)
        self.version = 0 if self.y.is_inference() else self.y._version
        return self.y
