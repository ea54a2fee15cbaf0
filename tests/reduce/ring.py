"""Ring attention, as users bring it: a Function whose keys and values go from rank to rank.

Source: Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context" (2023).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class RingAttention(torch.autograd.Function):
    """Causal attention; each rank has the queries, keys and values of its part of every sequence.

    A rank skips the keys of later parts, so the work is uneven. Shapes are those of ``scaled_dot_product_attention``:
    ``(rows, heads, tokens of this rank, width)``.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
        rank, size = group.rank(), group.size()
        out, log_sum = torch.zeros_like(q), q.new_full(q.shape[:-1], -torch.inf)
        held = torch.stack([k, v])
        for step in range(size):
            source = (rank - step) % size
            if source <= rank:
                scores = _scores(q, held[0], diagonal=source == rank)
                new = torch.logaddexp(log_sum, scores.logsumexp(-1))
                out = out * (log_sum - new).exp().unsqueeze(-1) + (scores - new.unsqueeze(-1)).exp() @ held[1]
                log_sum = new
            if step < size - 1:
                held = pass_on(held, group)
        ctx.save_for_backward(q, k, v, out, log_sum)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        q, k, v, out, log_sum = ctx.saved_tensors
        rank, size = ctx.group.rank(), ctx.group.size()
        grad_q, delta = torch.zeros_like(q), (grad * out).sum(-1, keepdim=True)
        held = torch.stack([k, v, torch.zeros_like(k), torch.zeros_like(v)])  # the gradients travel with them
        for step in range(size):
            source = (rank - step) % size
            if source <= rank:
                weights = (_scores(q, held[0], diagonal=source == rank) - log_sum.unsqueeze(-1)).exp()
                grad_scores = weights * (grad @ held[1].transpose(-1, -2) - delta) / q.shape[-1] ** 0.5
                grad_q += grad_scores @ held[0]
                held[2] += grad_scores.transpose(-1, -2) @ q
                held[3] += weights.transpose(-1, -2) @ grad
            held = pass_on(held, ctx.group)
        return grad_q, held[2], held[3], None


def _scores(q: Tensor, k: Tensor, *, diagonal: bool) -> Tensor:
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if diagonal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return scores


def pass_on(held: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send to the next rank, and return what came from the one before."""
    rank, size, got = group.rank(), group.size(), torch.empty_like(held)
    destination, source = (rank + 1) % size, (rank - 1) % size
    operations = [
        dist.P2POp(dist.isend, held, group=group, group_peer=destination),
        dist.P2POp(dist.irecv, got, group=group, group_peer=source),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return got
