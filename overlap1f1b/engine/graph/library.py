"""Exchanges that a library carries out by functions of its own, such as DeepEP's fused dispatch and combine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from overlap1f1b.engine.graph.edges import backward, edge_of
from overlap1f1b.engine.graph.entry import Entry
from overlap1f1b.transport import devices
from overlap1f1b.transport.calls import LibraryFunction
from overlap1f1b.transport.exchange import Transfer
from overlap1f1b.transport.streams import SideStream


class LibraryExchange:
    """One exchange by a library for one microbatch, in a graph of its own.

    Both methods run where lanes start their transfers: on a CPU in the lane's thread, which they occupy until the
    exchange has ended; on a GPU the thread of the engine queues them on the lane's stream.

    Args:
        function: The library's exchange.
        stream: Stream of the library's exchanges.
        anchor: Any leaf that requires a gradient; it gets none.

    Attributes:
        requires_grad: Whether each result requires a gradient; empty before the forward.
    """

    def __init__(self, function: LibraryFunction, stream: SideStream, anchor: Tensor) -> None:
        self.function, self.stream, self.anchor = function, stream, anchor
        self.requires_grad: list[bool] = []
        self._entries: list[Entry] = []
        self._results: list[GradientEdge] = []

    def forward(self, tensors: Sequence[Tensor]) -> Transfer[Any]:
        """Start the exchange of some tensors without a history; its result is a list of what the library returns."""
        results: list[Any] = []

        def run(*sent: Tensor) -> None:
            self._entries = [Entry(tensor) for tensor in sent]
            for tensor in sent:  # a function may keep them for its backward, which frees them on this stream
                if (gpu := devices.of(tensor.device)) is not None:
                    tensor.record_stream(gpu.current_stream(tensor.device))
            with torch.enable_grad():
                pairs = zip(sent, self._entries, strict=True)
                returned = self.function(*[entry.enter(tensor, self.anchor) for tensor, entry in pairs])
            self.requires_grad = [isinstance(result, Tensor) and result.requires_grad for result in returned]
            self._results = [
                edge_of(result) for result, required in zip(returned, self.requires_grad, strict=True) if required
            ]
            results.extend(
                result.detach() if required else result
                for result, required in zip(returned, self.requires_grad, strict=True)
            )

        mark = self.stream.run(run, *tensors)
        return Transfer(results, source=tensors, mark=mark)

    def backward(self, grads: Sequence[Tensor]) -> Transfer[Any]:
        """Start the exchange back of the gradients of all differentiable results.

        Its result is a list of the gradients of the sent tensors. The library's graph is released.
        """
        edges, entries, self._results, self._entries = self._results, self._entries, [], []
        found: list[Tensor] = []

        def run(*sent: Tensor) -> None:
            backward(edges, sent)
            found.extend(entry.dense() for entry in entries)

        mark = self.stream.run(run, *grads)
        return Transfer(found, source=grads, mark=mark)
