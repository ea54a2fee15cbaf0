"""A model for tensor and context parallelism, the same weights for every layout."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from overlap1f1b.moe import GroupedExperts
from tests import models
from tests.reduce.ring import RingAttention

V, H, HEADS, E, K, S = 31, 24, 4, 8, 2, 8


class Attention(nn.Module):
    """Causal attention; with a group of ranks that each have a part of every sequence, as in Ulysses or a ring."""

    def __init__(self, context: dist.ProcessGroup | None, *, ring: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(H, H) for _ in range(4))
        self.context, self.ring = context, ring

    def forward(self, x: Tensor) -> Tensor:
        heads = [part.unflatten(-1, (-1, H // HEADS)) for part in (self.q(x), self.k(x), self.v(x))]
        if self.context is not None and self.ring:
            y = RingAttention.apply(*(part.transpose(1, 2) for part in heads), self.context)
            return self.o(y.transpose(1, 2).flatten(-2))
        if self.context is not None:  # whole sequences of some heads, from a part of each sequence of all heads
            heads = [self._exchanged(part, self.context, 2, 1) for part in heads]
        y = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in heads), is_causal=True).transpose(1, 2)
        if self.context is not None:
            y = self._exchanged(y, self.context, 1, 2)
        return self.o(y.flatten(-2))

    @staticmethod
    def _exchanged(x: Tensor, group: dist.ProcessGroup, along: int, joined: int) -> Tensor:
        """Parts of all ranks, split along one dimension and joined along another."""
        sent = torch.stack(x.chunk(group.size(), along)).contiguous()
        return torch.cat(list(all_to_all_single(torch.empty_like(sent), sent, group=group)), joined)


class _Copied(torch.autograd.Function):
    """The same activations for every rank of a tensor group, whose gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Summed(torch.autograd.Function):
    """The sum of what the ranks of a tensor group have computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class Sliced(nn.Module):
    """A linear layer by hand: a plain slice of its weight along ``along``, with Megatron-Core's marks."""

    def __init__(self, whole: nn.Linear, along: int, tensor: DeviceMesh) -> None:
        super().__init__()
        self.group, rank, ranks = tensor.get_group(), tensor.get_local_rank(), tensor.size()
        self.weight = nn.Parameter(whole.weight.detach().chunk(ranks, along)[rank].clone())
        self.bias = nn.Parameter(whole.bias.detach() if along else whole.bias.detach().chunk(ranks)[rank].clone())
        for parameter in (self.weight,) if along else (self.weight, self.bias):
            vars(parameter).update(tensor_model_parallel=True, partition_dim=along)
        self.along = along

    def forward(self, x: Tensor) -> Tensor:
        if self.along == 0:
            return F.linear(_Copied.apply(x, self.group), self.weight, self.bias)
        return _Summed.apply(F.linear(x, self.weight), self.group) + self.bias


class Gate(nn.Module):
    """A router; where tokens are split over the tensor group, each rank has a part of its weight's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(E, H) / 4)

    def forward(self, tokens: Tensor) -> Tensor:
        weight: Any = self.weight
        if isinstance(weight, DTensor):
            weight = weight.to_local(grad_placements=[Partial()])
        return F.linear(tokens, weight)


class Block(nn.Module):
    """Attention and experts; every other block routes all tokens to two experts."""

    def __init__(self, group: dist.ProcessGroup | None, attention: Attention, *, few: bool) -> None:
        super().__init__()
        self.norm, self.attention, self.norm2, self.gate = nn.LayerNorm(H), attention, nn.LayerNorm(H), Gate()
        self.experts, self.choose = GroupedExperts(E, H, 12, group=group), models.first_experts if few else models.top_k
        self.experts.reset_parameters(torch.Generator().manual_seed(3), std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        y = self.norm2(x)
        tokens = (y.to_local() if isinstance(y, DTensor) else y).reshape(-1, H)
        indices, weights = self.choose(tokens, self.gate(tokens))
        return x + self.experts(tokens, indices, weights).reshape(x.shape)


class Dense(nn.Module):
    """A block without experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(H), nn.Linear(H, 2 * H), nn.Linear(2 * H, H)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


class Embedding(nn.Module):
    """Embedded tokens and positions; ``first`` is the position of the first token of this rank's part."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.tokens, self.positions, self.first = nn.Embedding(V, H), nn.Embedding(S, H), first

    def forward(self, tokens: Tensor) -> Tensor:
        at = torch.arange(self.first, self.first + tokens.shape[1])
        return self.tokens(tokens) + self.positions(at)


def build(
    mesh: DeviceMesh | None = None,
    *,
    sequence: bool = False,
    over: Sequence[str] | None = None,
    ring: bool = False,
    layers: int = 2,
    by_hand: bool = False,
) -> nn.Sequential:
    """Embedding, blocks with experts and one without, head, in float64.

    In a ``sequence`` norms and experts have a part of the tokens on each rank of the tensor group. Experts are shared
    ``over`` "ep", by default "tp", too, there. In a ``ring`` ranks along "cp" pass keys and values round; else they
    change sequences for heads. ``by_hand`` linear layers have plain slices over "tp", and all else copies; else they
    are DTensors.
    """
    torch.manual_seed(11)
    with models.default_dtype(torch.float64):
        sizes = {} if mesh is None else {name: mesh[name].size() for name in mesh.mesh_dim_names or ()}
        group = sharing(mesh, over or (("ep", "tp") if sequence else ("ep",)))
        context = mesh.get_group("cp") if mesh is not None and sizes.get("cp", 1) > 1 else None
        first = 0 if mesh is None or context is None else mesh.get_local_rank("cp") * (S // sizes["cp"])
        blocks: list[nn.Module] = [
            Block(group, Attention(context, ring=ring), few=bool(layer % 2)) for layer in range(layers)
        ]
        blocks.insert(1, Dense())
        model = nn.Sequential(Embedding(first), *blocks, nn.Sequential(nn.LayerNorm(H), nn.Linear(H, V)))
    if mesh is not None and "tp" in sizes:
        for block in model:
            if by_hand:
                _slice(block, mesh["tp"])
            else:
                _parallelize(block, mesh["tp"], sequence=sequence)
    return model


def sharing(mesh: DeviceMesh | None, over: Sequence[str]) -> dist.ProcessGroup | None:
    """The ranks that share the experts."""
    names = tuple(name for name in (mesh.mesh_dim_names or () if mesh is not None else ()) if name in over)
    if mesh is None or not names:
        return None
    return mesh.get_group(names[0]) if len(names) == 1 else mesh[names]._flatten("_".join(names)).get_group()


def _slice(block: nn.Module, tensor: DeviceMesh) -> None:
    if isinstance(block, Block):
        for name, along in {"q": 0, "k": 0, "v": 0, "o": 1}.items():
            setattr(block.attention, name, Sliced(getattr(block.attention, name), along, tensor))
    elif isinstance(block, Dense):
        block.up, block.down = Sliced(block.up, 0, tensor), Sliced(block.down, 1, tensor)


def _parallelize(block: nn.Module, tensor: DeviceMesh, *, sequence: bool) -> None:
    """Split a block's weights over the tensor group."""
    columns: dict[str, Any] = {}
    if isinstance(block, Block):
        into, out = ({"input_layouts": Shard(1)}, {"output_layouts": Shard(1)}) if sequence else ({}, {})
        columns = {f"attention.{name}": ColwiseParallel(**into) for name in "qkv"}
        columns["attention.o"] = RowwiseParallel(**out)
        if sequence:
            columns |= {"norm": SequenceParallel(), "norm2": SequenceParallel()}
            block.gate.weight = nn.Parameter(distribute_tensor(block.gate.weight.detach(), tensor, [Replicate()]))
    elif isinstance(block, Dense):
        columns = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if sequence:
            columns = {
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1)),
            }
    elif isinstance(block, Embedding):
        if sequence:  # each rank goes on with a part of the tokens
            split = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
            parallelize_module(block, tensor, split)
        columns = {"tokens": RowwiseParallel(input_layouts=Replicate())}
    else:
        columns = {"1": ColwiseParallel(output_layouts=Replicate())}
        if sequence:
            columns = {
                "0": SequenceParallel(),
                "1": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
            }
    parallelize_module(block, tensor, columns)
