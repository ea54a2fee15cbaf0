"""torchtitan's MoE layers with our exchange: a token is sent once to each rank that has experts of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from overlap1f1b.kernels.grouped_mm import KnownRows
from overlap1f1b.moe import Experts

LAYER, DISPATCHER = "RoutedExperts", "AllToAllTokenDispatcher"


class LayerExperts(Experts):
    """The experts of one of torchtitan's ``RoutedExperts``, on the rows that our exchange brings.

    The layer's forward calls its dispatcher, its experts and its dispatcher again. From now on the first two pass on
    what they are given, and the third is this module; router, shared experts and counts of tokens stay as they are.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        dispatcher, self._own = layer.token_dispatcher, (layer.inner_experts,)  # a child of the layer alone
        self.share(dispatcher.num_experts, dispatcher.ep_mesh.get_group())
        vars(layer)["inner_experts"] = _Passing(layer.inner_experts)
        vars(dispatcher).update(dispatch=self._kept, combine=self._routed)

    @property
    def row_kind(self) -> object:
        return self.experts, tuple((tuple(p.shape), p.dtype) for p in self.weights())

    def weights(self) -> Iterator[nn.Parameter]:
        return self._own[0].parameters()

    def compute(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        assert isinstance(counts, KnownRows)
        result: Tensor = self._own[0](rows, counts.rows.counts)  # on the device
        return result

    @staticmethod
    def _kept(tokens: Tensor, scores: Tensor, experts: Tensor, _: Tensor) -> tuple[Tensor, None, tuple[Tensor, Tensor]]:
        return tokens, None, (experts, scores)

    def _routed(self, tokens: Tensor, chosen: tuple[Tensor, Tensor], _: Tensor) -> Tensor:
        routed: Tensor = self(tokens, *chosen)
        return routed


class _Passing:
    """A layer's experts, which pass on the rows that the layer's forward gives them."""

    def __init__(self, own: nn.Module) -> None:
        self._own = own

    def __call__(self, rows: Tensor, _: Tensor | None) -> Tensor:
        return rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


def exchange_by_rows(part: nn.Module) -> None:
    """Put our exchange in the place of the all-to-all dispatchers of a part of a model, for good."""
    layers: list[Any] = [module for module in part.modules() if type(module).__name__ == LAYER]
    for layer in layers:
        if type(layer.token_dispatcher).__name__ == DISPATCHER and layer.token_dispatcher.ep_mesh is not None:
            layer.add_module("by_rows", LayerExperts(layer))
