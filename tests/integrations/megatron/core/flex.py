"""Stand-ins for the libraries DeepEP and HybridEP, which need GPUs: their buffers, over torch's own all-to-all.

Megatron-Core's own functions around them (``fused_a2a.py``) run as they are.
"""

import importlib
import random
import sys
import threading
import time
import types
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

FUNCTIONS = ("fused_dispatch", "fused_combine", "set_deepep_num_sms", "hybrid_ep_dispatch", "hybrid_ep_combine")
threads: list[str] = []
"""Names of the threads that have called a buffer, one for each exchange."""


class Handle(NamedTuple):
    """What later exchanges must know of a dispatch."""

    tokens: Tensor  # number of the token of each sent row
    count: int  # number of tokens
    order: Tensor  # places of the received rows in the order of their experts
    experts: Tensor  # expert of each sent row, if each row has one
    width: int  # number of experts
    send: list[int]
    receive: list[int]


def apply(delay_ms: float = 0.0) -> None:
    """Let Megatron-Core find the stand-ins; each exchange starts after a random delay of at most so many ms."""
    library, utils = types.ModuleType("deep_ep"), types.ModuleType("deep_ep.utils")
    library.__dict__.update(Buffer=Buffer, HybridEPBuffer=HybridEPBuffer, utils=utils)
    utils.__dict__.update(EventHandle=Event, EventOverlap=Event)
    sys.modules.update({"deep_ep": library, "deep_ep.utils": utils})
    Base.delay = delay_ms / 1e3

    from megatron.core.transformer.moe import fused_a2a, token_dispatcher

    importlib.reload(fused_a2a)
    for name in FUNCTIONS:
        setattr(token_dispatcher, name, getattr(fused_a2a, name))


class Event:
    """Stand-in for an event: work on a CPU is done when its call returns."""

    def __init__(self, *_: object) -> None: ...
    def current_stream_wait(self) -> None: ...


class Config:
    def get_nvl_buffer_size_hint(self, *_: object) -> int:
        return 0

    get_rdma_buffer_size_hint = get_nvl_buffer_size_hint


class Base:
    delay = 0.0

    def __init__(self, group: Any, *_: object, **__: object) -> None:
        self.group = group
        self.num_nvl_bytes = self.num_rdma_bytes = 0

    def begin(self) -> None:
        threads.append(threading.current_thread().name)
        time.sleep(random.random() * self.delay)

    def handle(self, chosen: list[Tensor], count: int, experts: Tensor, width: int = 0) -> Handle:
        send = torch.tensor([len(tokens) for tokens in chosen])
        receive = torch.empty_like(send)
        dist.all_to_all_single(receive, send, group=self.group)
        return Handle(torch.cat(chosen), count, torch.empty(0), experts, width, send.tolist(), receive.tolist())

    def there(self, rows: Tensor, handle: Handle) -> Tensor:
        return self._exchange(rows, handle.send, handle.receive)

    def back(self, rows: Tensor, handle: Handle) -> Tensor:
        return self._exchange(rows, handle.receive, handle.send)

    def _exchange(self, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        result = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(result, rows.contiguous(), receive, send, group=self.group)
        return result


class Buffer(Base):
    """Sends each token once to each rank that holds experts of it."""

    @staticmethod
    def get_dispatch_config(_: int) -> Config:
        return Config()

    get_combine_config = get_dispatch_config

    @staticmethod
    def set_num_sms(_: int) -> None: ...

    def get_dispatch_layout(self, token_indices: Tensor, num_experts: int, **_: object) -> Any:
        local = num_experts // self.group.size()
        ranks = range(self.group.size())
        in_rank = [((token_indices // local == rank) & (token_indices >= 0)).any(-1) for rank in ranks]
        per_rank = torch.stack([here.sum() for here in in_rank])
        per_expert = torch.bincount(token_indices[token_indices >= 0], minlength=num_experts)
        return per_rank, None, per_expert, torch.stack(in_rank, 1), Event()

    def dispatch(
        self,
        x: Tensor,
        handle: Handle | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        **_: object,
    ) -> Any:
        self.begin()
        if handle is not None:
            return self.there(x[handle.tokens], handle), None, None, None, None, Event()
        chosen = [here.nonzero().flatten() for here in is_token_in_rank.unbind(1)]
        handle = self.handle(chosen, len(x), torch.empty(0))
        local, indices, weights = len(num_tokens_per_expert) // self.group.size(), [], []
        for rank, tokens in enumerate(chosen):
            its, here = topk_idx[tokens], topk_weights[tokens]
            ours = (its // local == rank) & (its >= 0)
            indices.append(torch.where(ours, its % local, -1))
            weights.append(torch.where(ours, here, 0.0))
        received = self.there(torch.cat(indices), handle)
        counts = torch.bincount(received[received >= 0], minlength=local).tolist()
        rows, probs = self.there(x[handle.tokens], handle), self.there(torch.cat(weights), handle)
        return rows, received, probs, counts, handle, Event()

    def combine(self, x: Tensor, handle: Handle, topk_weights: Tensor | None = None, **_: object) -> Any:
        self.begin()
        total = None if topk_weights is None else self._sum(topk_weights, handle)
        return self._sum(x, handle), total, Event()

    def _sum(self, rows: Tensor, handle: Handle) -> Tensor:
        return rows.new_zeros(handle.count, rows.shape[1]).index_add_(0, handle.tokens, self.back(rows, handle))


class HybridEPBuffer(Base):
    """Sends each token to each of its experts; the rows come in the order of experts."""

    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        num_of_experts_per_rank: int = 0,
        handle: Handle | None = None,
        **_: object,
    ) -> Any:
        self.begin()
        if handle is not None:
            return self.there(hidden[handle.tokens], handle)[handle.order], None, None, None, handle
        chosen, local = [here.nonzero().flatten() for here in routing_map.unbind(1)], num_of_experts_per_rank
        experts = torch.cat([torch.full_like(tokens, expert) for expert, tokens in enumerate(chosen)])
        to = [torch.cat(chosen[rank * local : (rank + 1) * local]) for rank in range(self.group.size())]
        handle = self.handle(to, len(hidden), experts, len(chosen))
        own = self.there(experts % local, handle)
        handle = handle._replace(order=own.argsort(stable=True))
        rows, weights = self.there(hidden[handle.tokens], handle), self.there(probs[handle.tokens, experts], handle)
        return rows[handle.order], weights[handle.order], None, torch.bincount(own, minlength=local), handle

    def combine_with_unpermute(
        self, *, hidden: Tensor, handle: Handle, probs: Tensor | None = None, **_: object
    ) -> tuple[Tensor, Tensor | None]:
        self.begin()
        back = self.back(torch.zeros_like(hidden).index_copy_(0, handle.order, hidden), handle)
        total = hidden.new_zeros(handle.count, hidden.shape[1]).index_add_(0, handle.tokens, back)
        if probs is None:
            return total, None
        weights = self.back(torch.zeros_like(probs).index_copy_(0, handle.order, probs), handle)
        every = probs.new_zeros(handle.count, handle.width)
        every[handle.tokens, handle.experts] = weights
        return total, every
