"""Layers of experts of other libraries with our exchange: a token is sent once to each rank that has experts of it.

Router, experts, shared experts and losses stay the layer's own. Its dispatcher does nothing meanwhile.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from overlap1f1b.cut.replacement import Replacement
from overlap1f1b.kernels.grouped_mm import KnownRows
from overlap1f1b.moe import Experts
from overlap1f1b.moe.route import Route

Dispatcher = Literal["own", "rows"]
"""What exchanges the rows of a layer: its own dispatcher, or this module's experts."""


class LayerExperts(Experts):
    """The experts of another library's layer, called with the rows of each, and their numbers on the rows' device."""

    def __init__(self, own: nn.Module, experts: int, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.own = (own,)  # of this rank; a child of its layer alone
        self.share(experts, group)

    def weights(self) -> Iterator[nn.Parameter]:
        return self.own[0].parameters()

    def compute(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        assert isinstance(counts, KnownRows)
        result: Tensor = self.own[0](rows, counts.rows.counts)
        return result


# ------------------------------------------------------------------------------------ Megatron-Core: while a step lasts


class MegatronExperts(LayerExperts):
    """The experts of one of Megatron-Core's MoE layers; probabilities act in their activation, as there."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer.experts, layer.config.num_moe_experts, layer.ep_group)
        self.layer, self.top_k = (layer,), layer.config.moe_router_topk

    def compute_routed(self, rows: Tensor, weights: Tensor, route: Route) -> tuple[Tensor, Tensor | None]:
        """Apply the layer's experts, which use the weights ``[C]``, to rows ``[C, H]``; none of these act later."""
        counts = KnownRows(route.expert_rows)
        total = sum(counts)
        result, _ = self.own[0](rows[:total], torch.tensor(counts, device="cpu"), weights[:total])
        return F.pad(result, (0, 0, 0, len(rows) - total)) if total < len(rows) else result, None

    def routed(self, hidden: Tensor, chosen: tuple[Tensor, Tensor]) -> tuple[Tensor, None]:
        """Return the experts' sum for tokens ``[…, H]``, in the place of ``MoELayer.routed_experts_compute``."""
        routing_map, probs = chosen
        # A padded token has fewer experts than K: others join with a probability of 0.
        indices = routing_map.byte().sort(dim=1, descending=True, stable=True).indices[:, : self.top_k]
        tokens = hidden.reshape(-1, hidden.shape[-1])
        return self(tokens, indices, probs.gather(1, indices)).view_as(hidden), None

    def replacing(self) -> Iterator[Replacement]:
        """Yield what lets the layer exchange by this module; no other instance changes."""
        dispatcher = vars(self.layer[0].token_dispatcher)
        yield dispatcher, "dispatch_preprocess", lambda hidden, routing_map, probs: (hidden, (routing_map, probs))
        for name in ("token_dispatch", "token_combine", "combine_postprocess"):
            yield dispatcher, name, lambda *values: values if len(values) > 1 else values[0]
        yield vars(self.layer[0]), "routed_experts_compute", self.routed


# ----------------------------------------------------------------------------------- torchtitan and DeepSpeed: for good


class TorchtitanExperts(LayerExperts):
    """The experts of one of torchtitan's ``RoutedExperts``.

    The layer's forward calls its dispatcher, its experts and its dispatcher again. From now on the first two pass on
    what they are given, and the third is this module.
    """

    def __init__(self, layer: Any) -> None:
        own, dispatcher = layer.inner_experts, layer.token_dispatcher
        super().__init__(own, dispatcher.num_experts, dispatcher.ep_mesh.get_group())
        vars(layer)["inner_experts"] = _Passing(own)
        vars(dispatcher).update(
            dispatch=lambda tokens, scores, chosen, _: (tokens, None, (chosen, scores)),
            combine=lambda tokens, chosen, _: self(tokens, *chosen),
        )


class _Passing:
    """A layer's experts, which pass on the rows that the layer's forward gives them."""

    def __init__(self, own: nn.Module) -> None:
        self._own = own

    def __call__(self, rows: Tensor, _: Tensor | None) -> Tensor:
        return rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


class DeepSpeedExperts(LayerExperts):
    """The experts of one of DeepSpeed's ``AutoEPMoELayer``, in the place of its way through DeepEP."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer.experts, layer.num_experts, layer.ep_group)
        tensor = layer.folding_group_handles.spec.tp_size if layer.folding_group_handles is not None else 1
        if tensor > 1:
            raise ValueError(f"an AutoEPMoELayer folded over {tensor} tensor ranks; allowed: 1")
        self.first = layer.score_apply == "pre"
        vars(layer).update(
            comm_backend="deepep",
            _deepep_route=lambda tokens, routed: self(tokens, routed.selected_experts, routed.top_scores),
        )

    def compute_routed(self, rows: Tensor, weights: Tensor, route: Route) -> tuple[Tensor, Tensor | None]:
        """Apply the layer's experts to rows ``[C, H]``, weighed by ``[C]`` before or, as by default, after them."""
        if not self.first:
            return super().compute_routed(rows, weights, route)
        weighted = (rows.float() * weights[:, None]).to(rows.dtype)
        return super().compute_routed(weighted, weights, route)[0], None


def exchange_by_rows(model: nn.Module) -> int:
    """Put our exchange in the place of the all-to-alls of a model's layers, for good; return the number of layers.

    >>> exchange_by_rows(model)  # then o1.Engine(model, …)

    Known are torchtitan's ``RoutedExperts`` with an ``AllToAllTokenDispatcher``, and DeepSpeed's ``AutoEPMoELayer``.

    Raises:
        ValueError: DeepSpeed's layer is folded over tensor ranks.
    """
    made: dict[nn.Module, LayerExperts] = {}
    for module in model.modules():
        layer: Any = module
        match type(module).__name__:
            case "RoutedExperts" if (
                type(layer.token_dispatcher).__name__ == "AllToAllTokenDispatcher" and layer.token_dispatcher.ep_mesh
            ):
                made[module] = TorchtitanExperts(layer)
            case "AutoEPMoELayer" if layer.ep_size > 1:
                made[module] = DeepSpeedExperts(layer)
    for module, experts in made.items():
        module.add_module("by_rows", experts)
    return len(made)
