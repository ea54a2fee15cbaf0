"""Stand-ins for DeepEP's and HybridEP's fused operations, which need GPUs, with the same arguments and results."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Handle(NamedTuple):
    """What a combine must know of its dispatch."""

    tokens: Tensor  # number of the token of each sent row
    count: int  # number of tokens
    order: Tensor  # places of the received rows in the order of their experts
    send: list[int]
    receive: list[int]


def apply() -> None:
    """Let the flex dispatchers use the stand-ins."""
    from megatron.core.transformer.moe import token_dispatcher

    token_dispatcher.fused_dispatch, token_dispatcher.fused_combine = dispatch, combine
    token_dispatcher.set_deepep_num_sms = lambda count: None
    token_dispatcher.hybrid_ep_dispatch, token_dispatcher.hybrid_ep_combine = hybrid_dispatch, hybrid_combine


def dispatch(
    x: Tensor, token_indices: Tensor, token_probs: Tensor, num_experts: int, group: Any, **_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor, Handle]:
    """Send each token once to each rank that holds experts of it."""
    local = num_experts // group.size()
    ours = [(token_indices // local == rank) & (token_indices >= 0) for rank in range(group.size())]  # [T, K] each
    chosen = [here.any(-1).nonzero().flatten() for here in ours]
    handle = _handle(chosen, len(x), group)
    indices = torch.cat([torch.where(m, token_indices % local, -1)[t] for m, t in zip(ours, chosen, strict=True)])
    probs = torch.cat([torch.where(m, token_probs, 0.0)[t] for m, t in zip(ours, chosen, strict=True)])
    rows, indices, probs = (_exchange(part, handle, group) for part in (x[handle.tokens], indices, probs))
    return rows, indices, probs, torch.bincount(indices[indices >= 0], minlength=local), handle


def combine(x: Tensor, group: Any, handle: Handle, **_: object) -> tuple[Tensor, None]:
    """Send the rows back; add those of each token."""
    back = _exchange(x, handle._replace(send=handle.receive, receive=handle.send), group)
    return x.new_zeros(handle.count, x.shape[1]).index_add(0, handle.tokens, back), None


def hybrid_dispatch(
    *, x: Tensor, routing_map: Tensor, probs: Tensor, group: Any, num_local_experts: int, **_: object
) -> tuple[Tensor, Tensor, None, Tensor, tuple[Handle, Any]]:
    """Send each token to each of its experts; the rows come in the order of experts."""
    chosen = [here.nonzero().flatten() for here in routing_map.unbind(1)]  # for each expert
    local = num_local_experts
    handle = _handle([torch.cat(chosen[r * local : (r + 1) * local]) for r in range(group.size())], len(x), group)
    experts = torch.cat([torch.full_like(tokens, expert) for expert, tokens in enumerate(chosen)])
    sent = (x[handle.tokens], probs[handle.tokens, experts], experts % local)
    rows, weights, experts = (_exchange(part, handle, group) for part in sent)
    handle = handle._replace(order=experts.argsort(stable=True))
    counts = torch.bincount(experts, minlength=local)
    return rows[handle.order], weights[handle.order], None, counts, (handle, group)


def hybrid_combine(*, x: Tensor, handle: tuple[Handle, Any], **_: object) -> Tensor:
    """Send the rows back; add those of each token."""
    of, group = handle
    return combine(torch.zeros_like(x).index_copy(0, of.order, x), group, of)[0]


def _handle(chosen: list[Tensor], count: int, group: Any) -> Handle:
    send = torch.tensor([len(tokens) for tokens in chosen])
    receive = torch.empty_like(send)
    dist.all_to_all_single(receive, send, group=group)
    return Handle(torch.cat(chosen), count, torch.empty(0), send.tolist(), receive.tolist())


def _exchange(tensor: Tensor, handle: Handle, group: Any) -> Tensor:
    from megatron.core.tensor_parallel import all_to_all

    return all_to_all(group, tensor, handle.receive, handle.send)
