"""A small decoder-only MoE transformer for examples, tests and benchmarks."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from overlap1f1b.kernels.choice import Choice, Kernels, use_kernels
from overlap1f1b.kernels.fp8 import Precision
from overlap1f1b.moe.experts import GroupedExperts, WeightsIn, check_experts
from overlap1f1b.moe.layer import MoE, SwiGLU
from overlap1f1b.moe.router import Router, RouterConfig
from overlap1f1b.schedule.values import check_size

EPSILON = 1e-6
"""Of the normalisations."""
INIT_STD = 0.02
THETA = 10_000.0
"""Base of the rotary angles."""


@dataclass(frozen=True)
class MoEConfig(RouterConfig):
    """Sizes of a :class:`MoETransformer`, and the rules of its routers.

    Args:
        vocabulary: V.
        layers: Attention and MLP pairs.
        hidden: H.
        heads: N; each has size D = H / N.
        intermediate: I, of each expert.
        shared_intermediate: Intermediate size of the shared expert, which every token uses; 0 for none.
        dense_layers: Number of first layers with one dense MLP instead of experts.
        dense_intermediate: Intermediate size of the dense MLP.
        sequence: Largest S.
        dropout: Dropout probability of a layer's output, before it is added to the residual.
        weights_in: Place where routing weights are applied, see :data:`~overlap1f1b.moe.experts.WeightsIn`.
        precision: Of the experts, see :class:`~overlap1f1b.moe.experts.GroupedExperts`.
        kernels: See :data:`~overlap1f1b.kernels.choice.Choice`; one choice for all layers.

    All others are those of :class:`~overlap1f1b.moe.router.RouterConfig`.

    Raises:
        ValueError: A value is not allowed.
    """

    experts: int = 8
    top_k: int = 2
    aux_coefficient: float = 0.01
    vocabulary: int = 256
    layers: int = 4
    hidden: int = 256
    heads: int = 4
    intermediate: int = 512
    shared_intermediate: int = 0
    dense_layers: int = 0
    dense_intermediate: int = 1024
    sequence: int = 256
    dropout: float = 0.0
    weights_in: WeightsIn = "combine"
    precision: Precision | None = None
    kernels: Choice = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("vocabulary", "layers", "hidden", "heads", "intermediate", "dense_intermediate", "sequence"):
            check_size(name, getattr(self, name))
        check_size("shared_intermediate", self.shared_intermediate, 0)
        Kernels(self.kernels)  # it checks the choice
        check_experts(self.weights_in, self.precision, self.hidden, self.intermediate)
        if self.hidden % (2 * self.heads):
            step = 2 * self.heads
            raise ValueError(f"hidden={self.hidden} with heads={self.heads}; allowed: multiples of {step}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout}; allowed: 0 to less than 1")
        if not 0 <= self.dense_layers <= self.layers:
            raise ValueError(f"dense_layers={self.dense_layers} of {self.layers} layers; allowed: 0 to {self.layers}")

    @property
    def router(self) -> RouterConfig:
        """The router's part of the configuration."""
        return RouterConfig(**{field.name: getattr(self, field.name) for field in fields(RouterConfig)})


class Rotary(nn.Module):
    """Rotary positions (Su et al. 2021): element ``i`` of a head turns with element ``i + D/2``, as in Llama.

    The table ``[2, S, D]`` of cosines and signed sines follows from the arguments. So it is not in checkpoints, and it
    is built again when the module moves: ``model.bfloat16()`` does not round the angles.

    Args:
        sequence: Largest S.
        size: D.
    """

    table: Tensor

    def __init__(
        self,
        sequence: int,
        size: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.sequence, self.size = sequence, size
        self.register_buffer("table", self._build(torch.empty(0, dtype=dtype, device=device)), persistent=False)

    def _build(self, like: Tensor) -> Tensor:
        frequency = THETA ** -(torch.arange(0, self.size, 2, dtype=torch.float64, device="cpu") / self.size)
        angle = torch.outer(torch.arange(self.sequence, dtype=torch.float64, device="cpu"), frequency)
        cos, sin = angle.cos(), angle.sin()
        table = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)])
        return table.to(like.device, torch.promote_types(like.dtype, torch.float32))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.table = self._build(self.table)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x [B, N, S, D]`` rotated by position."""
        S = x.shape[-2]
        if self.sequence < S:
            raise ValueError(f"{S} positions in a model with sequence={self.sequence}; allowed: 1 to {self.sequence}")
        cos, sin = self.table[:, :S]
        a, b = x.chunk(2, dim=-1)
        return (x * cos).add_(torch.cat([b, a], dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Causal attention with rotary positions, ``[B, S, H] → [B, S, H]``."""

    def __init__(self, config: MoEConfig, **factory: Any) -> None:
        super().__init__()
        self.size = config.hidden // config.heads
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden, bias=False, **factory)
        self.out = nn.Linear(config.hidden, config.hidden, bias=False, **factory)
        self.rotary = Rotary(config.sequence, self.size, **factory)

    def forward(self, x: Tensor) -> Tensor:
        heads = rearrange(self.qkv(x), "B S (N D) -> B N S D", D=self.size)
        N = heads.shape[1] // 3
        qk, v = heads.split([2 * N, N], dim=1)
        q, k = self.rotary(qk).chunk(2, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(rearrange(y, "B N S D -> B S (N D)"))


class Block(nn.Module):
    """A decoder layer, normalised before each part: ``x + attention(norm(x))``, then ``x + mlp(norm(x))``."""

    def __init__(self, config: MoEConfig, mlp: MoE | SwiGLU, **factory: Any) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, EPSILON, **factory)
        self.attention = Attention(config, **factory)
        self.mlp_norm = nn.RMSNorm(config.hidden, EPSILON, **factory)
        self.mlp = mlp
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Head(nn.Module):
    """Final normalisation and projection, ``[B, S, H] → [B, S, V]``."""

    def __init__(self, config: MoEConfig, **factory: Any) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden, EPSILON, **factory)
        self.out = nn.Linear(config.hidden, config.vocabulary, bias=False, **factory)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


class MoETransformer(nn.Sequential):
    """Decoder-only transformer with experts: a chain of modules that each map one tensor to one tensor.

    >>> model = MoETransformer(MoEConfig(layers=2))
    >>> logits = model(tokens)  # [B, S] int64 → [B, S, V]
    >>> first, last = model[:2], model[2:]  # two stages: embedding and layer0, layer1 and head

    The children are ``embedding``, ``layer0``, ``layer1``, … and ``head``.

    Args:
        config: Sizes and options.
        group: Ranks that share the experts of each layer.
        seed: Seed of the weights, see :meth:`reset_parameters`.

    Raises:
        ValueError: The experts cannot be divided evenly over the ranks.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        group: dist.ProcessGroup | None = None,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        factory: dict[str, Any] = {"dtype": dtype, "device": device}

        def mlp(layer: int) -> MoE | SwiGLU:
            if layer < config.dense_layers:
                return SwiGLU(config.hidden, config.dense_intermediate, **factory)
            options = {"weights_in": config.weights_in, "precision": config.precision, "group": group, **factory}
            sizes = config.hidden, config.intermediate, config.router
            return MoE(*sizes, shared_intermediate=config.shared_intermediate, **options)

        children: OrderedDict[str, nn.Module] = OrderedDict()
        children["embedding"] = nn.Embedding(config.vocabulary, config.hidden, **factory)
        for layer in range(config.layers):
            children[f"layer{layer}"] = Block(config, mlp(layer), **factory)
        children["head"] = Head(config, **factory)
        super().__init__(children)
        self.config = config
        use_kernels(self, config.kernels)
        self.reset_parameters(seed)

    @torch.no_grad()
    def reset_parameters(self, seed: int = 0) -> None:
        """Draw normal weights of deviation 0.02, or 0.02 / √(2 · layers) if they write to the residual (GPT-2).

        They are drawn in float32 on the CPU, so that the model depends on configuration and seed alone, not on the
        device or the number of ranks that share the experts.
        """
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            match module:
                case nn.Linear() | nn.Embedding():
                    where = "meta" if module.weight.is_meta else "cpu"
                    drawn = torch.empty(module.weight.shape, dtype=torch.float32, device=where)
                    module.weight.copy_(drawn.normal_(std=INIT_STD, generator=generator))
                case GroupedExperts():
                    module.reset_parameters(generator, INIT_STD)
                case nn.RMSNorm():
                    module.reset_parameters()
                case Router():
                    module.correction_bias.zero_()
                    module.load.zero_()
        residual = 1 / math.sqrt(2 * self.config.layers)
        for module in self.modules():
            match module:
                case Attention():
                    module.out.weight.mul_(residual)
                case SwiGLU():
                    module.down.weight.mul_(residual)
                case GroupedExperts():
                    module.down.mul_(residual)

    def __getitem__(self, idx: slice | int) -> nn.Sequential | nn.Module:
        """Return a child, or an ``nn.Sequential`` of the children of a slice, which keep their names."""
        if isinstance(idx, slice):
            return nn.Sequential(OrderedDict(list(self._modules.items())[idx]))
        return super().__getitem__(idx)
