"""Megatron-Core's MoE layers with our exchange: a token is sent once to each rank that has experts of it.

Router, experts, shared experts and losses stay the layer's own. Its dispatcher does nothing meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overlap1f1b.engine.run.replaced import Replacement
from overlap1f1b.integrations.megatron.config import class_names
from overlap1f1b.kernels.grouped_mm import KnownRows
from overlap1f1b.moe import Experts
from overlap1f1b.moe.route import Route

LAYER = "MoELayer"
REFUSED: dict[str, object] = {
    "moe_expert_capacity_factor": None,  # rows of an expert's room; ours is the engine's capacity
    "moe_shared_expert_overlap": False,  # its dispatcher computes the shared experts in parts
    "moe_router_padding_for_fp8": False,
    "moe_router_padding_for_quantization": False,
    "expert_tensor_parallel_size": 1,
}
"""Fields of a config that say how a dispatcher moves rows, each with the value that our exchange allows."""


class LayerExperts(Experts):
    """The experts of one of Megatron-Core's MoE layers; probabilities act in their activation, as there.

    Raises:
        ValueError: The layer's config has an option of :data:`REFUSED`.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        for field, allowed in REFUSED.items():
            if (value := getattr(layer.config, field, allowed)) not in (allowed, None):
                raise ValueError(f"{field}={value!r} with dispatcher='rows'; allowed: {allowed}")
        self.own, self.top_k = layer.experts, layer.config.moe_router_topk
        self.share(layer.config.num_moe_experts, layer.ep_group)

    def compute_routed(self, rows: Tensor, weights: Tensor, route: Route) -> tuple[Tensor, Tensor | None]:
        counts = KnownRows(route.expert_rows)
        total = sum(counts)
        result, _ = self.own(rows[:total], torch.tensor(counts, device="cpu"), weights[:total])
        return F.pad(result, (0, 0, 0, len(rows) - total)) if total < len(rows) else result, None

    def routed(self, hidden: Tensor, chosen: tuple[Tensor, Tensor]) -> tuple[Tensor, None]:
        """Return the experts' sum for tokens ``[…, H]``, in the place of ``MoELayer.routed_experts_compute``."""
        routing_map, probs = chosen
        # A padded token has fewer experts than K: others join with a probability of 0.
        indices = routing_map.byte().sort(dim=1, descending=True, stable=True).indices[:, : self.top_k]
        tokens = hidden.reshape(-1, hidden.shape[-1])
        return self(tokens, indices, probs.gather(1, indices)).view_as(hidden), None


def layers_of(model: nn.Module) -> list[Any]:
    """Return a model's MoE layers of Megatron-Core."""
    return [module for module in model.modules() if LAYER in class_names(module)]


def by_rows(layers: Iterable[Any], experts: Iterable[Any]) -> Iterator[Replacement]:
    """Yield what lets layers exchange by their :class:`LayerExperts`; only these instances change."""
    for layer, own in zip(layers, experts, strict=True):
        dispatcher = vars(layer.token_dispatcher)
        yield dispatcher, "dispatch_preprocess", _preprocess
        for name in ("token_dispatch", "token_combine", "combine_postprocess"):
            yield dispatcher, name, _same
        yield vars(layer), "routed_experts_compute", own.routed


def _preprocess(hidden: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    return hidden, (routing_map, probs)


def _same(*values: Any) -> Any:
    return values if len(values) > 1 else values[0]
