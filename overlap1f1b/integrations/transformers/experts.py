"""A model's own experts as experts of the engine: each rank holds a part of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlap1f1b.integrations.transformers.finding import adapter_around, counters, routing_names
from overlap1f1b.kernels.swiglu import swiglu
from overlap1f1b.moe import Experts

GROUPED = {"has_gate": True, "has_bias": False, "is_transposed": False, "has_post_expert_norm": False}
"""What ``use_experts_implementation`` of transformers says of ``gate_up_proj [E, 2·I, H]``, ``down_proj [E, H, I]``."""

SILU = ("SiLU", "SiLUActivation")


class OwnExperts(Experts):
    """Mixed into the class of a model's experts module, whose instance thereby becomes one of the engine's.

    A rank runs the model's own forward on the rows that it received, each with one local expert and weight one; the
    routing weights are applied where the token came from. Where the weights are laid out in the usual way, grouped
    matrix products do the same with their weight gradients apart.
    """

    own_class: ClassVar[type[nn.Module]]
    own_names: tuple[str, str, str]
    grouped: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        given = dict(zip(self.own_names, args, strict=False)) | kwargs
        if set(given) != set(self.own_names):
            raise ValueError(f"experts called with {sorted(given)}; allowed: {', '.join(self.own_names)}")
        tokens, indices, weights = (given[name] for name in self.own_names)
        flat = tokens.reshape(-1, tokens.shape[-1])
        if indices.shape != weights.shape or indices.dim() != 2 or len(indices) != len(flat):
            raise ValueError(
                f"experts called with tokens {list(tokens.shape)}, indices {list(indices.shape)} and weights "
                f"{list(weights.shape)}; allowed: [T, H], [T, K] and [T, K]"
            )
        result: Tensor = super().__call__(flat, indices.long(), weights)
        return result.view_as(tokens)

    @property
    def reads_counts_late(self) -> bool:
        return self.grouped

    def compute(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        own: Any = self
        if self.grouped:
            gate_up = self.product(rows, own.gate_up_proj, counts)
            # Where it is SwiGLU, which no flag of the module says, it runs by kernels; in torch they are the same ops.
            plain = own._apply_gate.__name__ == "_default_apply_gate" and type(own.act_fn).__name__ in SILU
            gated = swiglu(gate_up, self.kernels) if plain else own._apply_gate(gate_up)
            return self.product(gated, own.down_proj, counts)
        if not len(rows):  # not every forward can do without
            return rows.detach()
        local = torch.arange(self.local_experts, device=rows.device)
        indices = local.repeat_interleave(torch.tensor(counts, device=rows.device), output_size=len(rows))
        result: Tensor = self.own_class.forward(self, rows, indices[:, None], rows.new_ones(len(rows), 1))
        return result.reshape(rows.shape)


def adopt(
    model: nn.Module, module: nn.Module, count: int, group: dist.ProcessGroup | None, name: str, *, grouped: bool
) -> None:
    """Makes an experts module of a model, called so, one of the engine's, with this rank's part of its weights.

    Raises:
        ValueError: The experts have an adapter, such as LoRA's, they are not divisible by the ranks, or a parameter is
            not by the experts.
    """
    if (adapter := adapter_around(model, name)) is not None:
        raise ValueError(
            f"{adapter[0]} ({type(adapter[1]).__name__}) is an adapter of experts, whose weights are not divided by "
            "experts and which the engine would not call; allowed: adapters of other layers, or merged into the experts"
        )
    names = routing_names(module)
    assert names is not None
    own = type(module)
    module.__class__ = type(own.__name__, (OwnExperts, own), {"__module__": own.__module__, "own_class": own})
    assert isinstance(module, OwnExperts)
    module.own_names = names
    module.grouped = (
        grouped
        and all(getattr(module, flag, None) is wanted for flag, wanted in GROUPED.items())
        and {label: p.dim() for label, p in module.named_parameters()} == {"gate_up_proj": 3, "down_proj": 3}
    )
    try:
        module.share(count, group)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if module.local_experts < count:
        _shard(module, count, name)


def _shard(module: OwnExperts, count: int, name: str) -> None:
    rank, ranks = module.exchange.rank, module.exchange.ranks
    for part in module.modules():
        for label, parameter in part.named_parameters(recurse=False):
            size = parameter.shape[0] if parameter.dim() else 0
            if not size or size % count:
                raise ValueError(
                    f"{name}.{label} of shape {list(parameter.shape)} has no part for each of {count} experts; "
                    "allowed on several ranks along 'ep': one that has"
                )
            mine = parameter.detach().chunk(ranks)[rank].clone()
            part.register_parameter(label, nn.Parameter(mine, requires_grad=parameter.requires_grad))
        for attribute, value in list(counters(part)):
            if value == count and attribute not in ("experts", "local_experts"):
                setattr(part, attribute, module.local_experts)
