"""The MoE layer: router, experts, and an optional shared expert that every token uses."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlap1f1b.kernels.choice import Kernels, use_kernels
from overlap1f1b.kernels.fp8 import Precision
from overlap1f1b.kernels.swiglu import swiglu
from overlap1f1b.moe.experts import GroupedExperts, WeightsIn
from overlap1f1b.moe.router import Device, Router, RouterConfig, blanked, check_factory, check_tokens, flat_mask
from overlap1f1b.schedule.values import check_size, checked


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) · up(x))`` (Shazeer 2020), of sizes H and I, gate and up in one product."""

    @checked
    def __init__(
        self, hidden: int, intermediate: int, *, dtype: torch.dtype | None = None, device: Device = None
    ) -> None:
        super().__init__()
        check_size("hidden", hidden)
        check_size("intermediate", intermediate)
        check_factory(dtype, device)
        self.kernels = Kernels()
        self.gate_up = nn.Linear(hidden, 2 * intermediate, bias=False, dtype=dtype, device=device)
        self.down = nn.Linear(intermediate, hidden, bias=False, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(swiglu(self.gate_up(x), self.kernels))


class MoE(nn.Module):
    """A mixture of experts in place of an MLP.

    >>> moe = MoE(64, 128, RouterConfig(experts=8, top_k=2))
    >>> y = moe(x)  # [B, S, H] or [T, H], as x
    >>> y = moe(x, mask)  # bool [B, S] or [T], True for real tokens: others go nowhere, count nowhere, and give 0

    ``self.experts`` is called in one place: ``(tokens [T, H], indices [T, K] int64, weights [T, K]) →
    [T, H]``. The engine suspends the forward at the exchanges inside.

    Args:
        hidden: H.
        intermediate: I, of each expert.
        router: Number of experts and rules of the choice.
        shared_intermediate: Intermediate size of the shared expert, 0 for none.
        weights_in: Place where routing weights are applied, see :data:`~overlap1f1b.moe.experts.WeightsIn`.
        precision: Of the experts, see :class:`~overlap1f1b.moe.experts.GroupedExperts`.
        group: Ranks that share the experts.

    Raises:
        ValueError: A size is not a whole number, the experts cannot be divided evenly over the ranks, or ``weights_in``
            or ``precision`` is unknown or does not fit.
    """

    @checked
    def __init__(
        self,
        hidden: int,
        intermediate: int,
        router: RouterConfig,
        *,
        shared_intermediate: int = 0,
        weights_in: WeightsIn = "combine",
        precision: Precision | None = None,
        group: dist.ProcessGroup | None = None,
        dtype: torch.dtype | None = None,
        device: Device = None,
    ) -> None:
        super().__init__()
        check_size("shared_intermediate", shared_intermediate, 0)
        factory: dict[str, Any] = {"dtype": dtype, "device": device}
        self.hidden, self.router = hidden, Router(hidden, router, **factory)
        options = {"weights_in": weights_in, "precision": precision, "group": group, **factory}
        self.experts = GroupedExperts(router.experts, hidden, intermediate, **options)
        self.shared = SwiGLU(hidden, shared_intermediate, **factory) if shared_intermediate else None
        use_kernels(self, "auto")  # one choice for all

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return ``[…, H]`` of ``x […, H]``; where ``mask [...]`` is False, tokens go to no expert."""
        check_tokens(x, self.hidden)
        tokens, shape = x.flatten(0, -2), x.shape
        masks = () if mask is None else (flat_mask(mask, x),)
        indices, weights = self.router(tokens, *masks)
        y = self.experts(tokens, indices, weights)
        if self.shared is not None:  # after the experts: the dispatch must not wait for it
            y = y + self.shared(blanked(tokens, *masks) if masks else tokens)
        return y.reshape(shape)
