"""The byte-level model of train and bench: a small decoder-only transformer with experts."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from overlap1f1b.kernels.choice import Choice, use_kernels
from overlap1f1b.kernels.fp8 import Precision
from overlap1f1b.moe.experts import GroupedExperts, WeightsIn
from overlap1f1b.moe.layer import MoE
from overlap1f1b.moe.router import RouterConfig
from overlap1f1b.running.sizes import ModelOptions
from overlap1f1b.schedule.values import check_size

EPSILON = 1e-6  # of the normalisations
INIT_STD = 0.02
THETA = 10_000.0  # base of the rotary angles


@dataclass(frozen=True)
class MoEConfig(ModelOptions, RouterConfig):
    """Sizes of a :class:`MoETransformer` and the rules of its routers; ``ValueError`` for what is not allowed."""

    aux_coefficient: float = 0.01
    vocabulary: int = 256
    sequence: int = 256  # the longest
    weights_in: WeightsIn = "combine"
    precision: Precision | None = None
    kernels: Choice = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check()
        for name in ("vocabulary", "sequence"):
            check_size(name, getattr(self, name))


class Attention(nn.Module):
    """Causal attention ``[B, S, H] → [B, S, H]``; element ``i`` of a head turns with ``i + D/2``, as in Llama."""

    table: Tensor  # [2, S, D], cosines and signed sines, in float32 or wider

    def __init__(
        self, config: MoEConfig, *, dtype: torch.dtype | None, device: torch.device | str | int | None
    ) -> None:
        super().__init__()
        hidden, self.size = config.hidden, config.hidden // config.heads
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False, dtype=dtype, device=device)
        self.out = nn.Linear(hidden, hidden, bias=False, dtype=dtype, device=device)
        frequency = THETA ** -(torch.arange(0, self.size, 2, dtype=torch.float64) / self.size)
        angle = torch.outer(torch.arange(config.sequence, dtype=torch.float64), frequency)
        cos, sin = angle.cos(), angle.sin()
        table = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)])
        wide = torch.promote_types(self.out.weight.dtype, torch.float32)
        self.register_buffer("table", table.to(self.out.weight.device, wide), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = rearrange(self.qkv(x), "B S (N D) -> B N S D", D=self.size)
        N = heads.shape[1] // 3
        qk, v = heads.split([2 * N, N], dim=1)
        q, k = self.rotated(qk).chunk(2, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(rearrange(y, "B N S D -> B S (N D)"))

    def rotated(self, x: Tensor) -> Tensor:
        """Return ``x [B, N, S, D]`` rotated by position (Su et al. 2021)."""
        cos, sin = self.table[:, : x.shape[-2]]
        a, b = x.chunk(2, dim=-1)
        return (x * cos).add_(torch.cat([b, a], dim=-1) * sin).to(x.dtype)


class Block(nn.Module):
    """A decoder layer, normalised before each part: ``x + attention(norm(x))``, then ``x + mlp(norm(x))``."""

    def __init__(self, config: MoEConfig, mlp: MoE, **factory: Any) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, EPSILON, **factory)
        self.attention = Attention(config, **factory)
        self.mlp_norm = nn.RMSNorm(config.hidden, EPSILON, **factory)
        self.mlp = mlp
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class MoETransformer(nn.Sequential):
    """The children ``embedding``, ``layer0``, ``layer1``, … and ``head``: tokens ``[B, S]`` → logits ``[B, S, V]``.

    Weights are normal of deviation 0.02, or 0.02 / √(2 · layers) if they write to the residual (GPT-2). They are drawn
    in float32 on the CPU: the seed gives one model on every device and for every number of ranks in ``group``, which
    share the experts.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        group: dist.ProcessGroup | None = None,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        factory: dict[str, Any] = {"dtype": dtype, "device": device}
        router = RouterConfig(**{field.name: getattr(config, field.name) for field in fields(RouterConfig)})
        options = {"weights_in": config.weights_in, "precision": config.precision, "group": group, **factory}

        def block() -> Block:
            return Block(config, MoE(config.hidden, config.intermediate, router, **options), **factory)

        norm = nn.RMSNorm(config.hidden, EPSILON, **factory)
        out = nn.Linear(config.hidden, config.vocabulary, bias=False, **factory)
        children: dict[str, nn.Module] = {"embedding": nn.Embedding(config.vocabulary, config.hidden, **factory)}
        children |= {f"layer{layer}": block() for layer in range(config.layers)}
        super().__init__(OrderedDict(children, head=nn.Sequential(OrderedDict(norm=norm, out=out))))
        self.config = config
        use_kernels(self, config.kernels)
        self._draw(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def _draw(self, generator: torch.Generator) -> None:
        """Draw the initial weights, as GPT-2 does: those before a residual sum are smaller."""
        for module in self.modules():
            match module:
                case nn.Linear() | nn.Embedding():
                    drawn = torch.empty(module.weight.shape, dtype=torch.float32)
                    module.weight.copy_(drawn.normal_(std=INIT_STD, generator=generator))
                case GroupedExperts():
                    module.reset_parameters(generator, INIT_STD)
        for name, parameter in self.named_parameters():
            if name.endswith(("attention.out.weight", "down.weight", "experts.down")):
                parameter.mul_(1 / math.sqrt(2 * self.config.layers))
