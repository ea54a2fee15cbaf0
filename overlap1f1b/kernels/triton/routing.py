"""Scores, choice and weights of experts, each token in one pass, and the gradient of its logits."""

from functools import cache

import torch
import triton.language as tl
from torch import Tensor

from overlap1f1b.kernels.routing import TINY, Rule
from overlap1f1b.kernels.triton.launch import beside, interpreted, kernel, wide

CELLS = 2048  # tokens times experts of a program
COUNTED_CELLS = 16_384  # choices times experts of a program


@cache
def _tile(experts: int) -> tuple[int, int]:
    return 1024 if interpreted() else max(CELLS // wide(experts), 1), wide(experts)


def count_choices_(load: Tensor, indices: Tensor) -> Tensor:
    assert load.is_contiguous()
    flat = indices.reshape(-1)
    _, BE = _tile(len(load))
    BLOCK = max((1 << 19 if interpreted() else COUNTED_CELLS) // BE, 16)
    _add_choices((-(-len(flat) // BLOCK), 1), (load, flat), (len(flat),), (len(load), BLOCK, BE), num_warps=8)
    torch.autograd.graph.increment_version(load)
    return load


def route_tokens(
    logits: Tensor, bias: Tensor, rule: Rule, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`overlap1f1b.kernels.routing.route_tokens`, by one kernel."""
    logits = logits.contiguous()
    T, E = logits.shape
    indices = torch.empty(T, rule.top_k, dtype=torch.int64, device=logits.device)
    weights, scores = logits.new_empty(T, rule.top_k, dtype=dtype), torch.empty_like(logits)
    BT, BE = _tile(E)
    groups = rule.groups, wide(rule.groups), rule.top_groups, rule.best(E)
    constants = E, rule.scaling, rule.top_k, wide(rule.top_k), *groups, rule.softmax, rule.normalize, TINY, BT, BE
    _route((-(-T // BT), 1), (logits, bias.contiguous(), indices, weights, scores), (T,), constants)
    return indices, weights, scores


def route_tokens_backward(
    grad_weights: Tensor, grad_scores: Tensor | None, scores: Tensor, indices: Tensor, rule: Rule
) -> Tensor:
    """As :func:`overlap1f1b.kernels.routing.route_tokens_backward`, by one kernel."""
    grad_weights, scores = beside(grad_weights), scores.contiguous()
    T, E = scores.shape
    out = torch.empty_like(scores)
    BT, BE = _tile(E)
    dense = out if grad_scores is None else beside(grad_scores)
    tensors = grad_weights, dense, scores, indices.contiguous(), out
    flags = grad_weights.stride(0), rule.softmax, rule.normalize, grad_scores is not None, dense.stride(0)
    constants = E, rule.scaling, rule.top_k, wide(rule.top_k), *flags, TINY, BT, BE
    _route_backward((-(-T // BT), 1), tensors, (T,), constants)
    return out


@kernel("choices")
def _add_choices(load, indices, choices, EXPERTS, BLOCK, BE):
    """Add how often a block's choices name each expert."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    chosen = tl.load(indices + place, mask=place < choices, other=-1)
    every = tl.arange(0, BE)
    count = tl.sum((chosen[:, None] == every[None, :]).to(tl.int32), 0)
    tl.atomic_add(load + every, count.to(tl.int64), mask=(every < EXPERTS) & (count > 0), sem="relaxed")


@kernel("T")
def _route(
    logits, bias, indices, weights, scores, T,
    E, SCALING, K, WIDE_K, GROUPS, WIDE_G, TOP_GROUPS, BEST, SOFTMAX, NORMALIZE, TINY, BT, BE,
):  # fmt: skip
    """Compute scores of whole tokens, their K best experts and the weights."""
    token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    expert = tl.arange(0, BE)
    here, real = token < T, (expert < E)[None, :]
    inside = here[:, None] & real
    low = float("-inf")
    place = token[:, None] * E + expert[None, :]
    x = tl.load(logits + place, mask=inside, other=0.0)
    if SOFTMAX:
        x = tl.where(real, x, low)
        power = tl.exp(x - tl.max(x, 1)[:, None])
        score = power / tl.sum(power, 1)[:, None]
    else:
        score = tl.sigmoid(x)
    tl.store(scores + place, score, mask=inside)
    choice = tl.where(real, score + tl.load(bias + expert, mask=expert < E, other=0.0)[None, :], low)
    # Like torch, take what is not a number for the largest: no comparison finds it, but padding behind the experts.
    choice = tl.where(choice >= low, choice, float("inf"))
    if TOP_GROUPS < GROUPS:
        size = E // GROUPS
        group = expert // size
        every = tl.arange(0, WIDE_G)
        ranks = tl.full([BT, WIDE_G], low, dtype=tl.float32)
        for g in tl.static_range(GROUPS):
            member = tl.where((group == g)[None, :], choice, low)
            best = tl.max(member, 1)
            if BEST == 2:
                first = tl.argmax(member, 1)
                best += tl.max(tl.where(expert[None, :] == first[:, None], low, member), 1)
            ranks = tl.where(every[None, :] == g, best[:, None], ranks)
        kept = tl.zeros([BT, BE], dtype=tl.int32)
        for _ in tl.static_range(TOP_GROUPS):
            g = tl.argmax(ranks, 1)
            kept += (group[None, :] == g[:, None]).to(tl.int32)
            ranks = tl.where(every[None, :] == g[:, None], low, ranks)
        choice = tl.where(kept > 0, choice, low)
    column = tl.arange(0, WIDE_K)
    picked = tl.zeros([BT, WIDE_K], dtype=tl.int32)
    weight = tl.zeros([BT, WIDE_K], dtype=tl.float32)
    for k in tl.static_range(K):
        best = tl.argmax(choice, 1)  # among equal ones the first
        this = expert[None, :] == best[:, None]
        picked = tl.where(column[None, :] == k, best[:, None], picked)
        chosen = tl.sum(tl.where(this, score, 0.0), 1)
        weight = tl.where(column[None, :] == k, chosen[:, None], weight)
        choice = tl.where(this, low, choice)
    if NORMALIZE:
        weight /= (tl.sum(weight, 1) + TINY)[:, None]
    out = token[:, None] * K + column[None, :]
    mask = here[:, None] & (column < K)[None, :]
    tl.store(indices + out, picked.to(tl.int64), mask=mask)
    tl.store(weights + out, (weight * SCALING).to(weights.dtype.element_ty), mask=mask)


@kernel("T")
def _route_backward(
    grad_weights, grad_scores, scores, indices, grad_logits, T,
    E, SCALING, K, WIDE_K, STRIDE, SOFTMAX, NORMALIZE, DENSE, DENSE_STRIDE, TINY, BT, BE,
):  # fmt: skip
    """Compute the gradient of logits from those of weights and, if DENSE, of scores."""
    token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    expert, column = tl.arange(0, BE), tl.arange(0, WIDE_K)
    here = token < T
    place = token[:, None] * E + expert[None, :]
    inside = here[:, None] & (expert < E)[None, :]
    score = tl.load(scores + place, mask=inside, other=0.0)
    there = token[:, None] * K + column[None, :]
    mask = here[:, None] & (column < K)[None, :]
    of_weights = grad_weights + token[:, None] * STRIDE + column[None, :]
    grad = tl.load(of_weights, mask=mask, other=0.0).to(tl.float32) * SCALING
    if NORMALIZE:
        picked = tl.load(indices + there, mask=mask, other=0)
        chosen = tl.load(scores + token[:, None] * E + picked, mask=mask, other=0.0)
        total = (tl.sum(chosen, 1) + TINY)[:, None]
        grad = grad / total - (tl.sum(grad * chosen, 1)[:, None] / total) / total
    whole = tl.zeros([BT, BE], dtype=tl.float32)
    if DENSE:
        of_scores = grad_scores + token[:, None] * DENSE_STRIDE + expert[None, :]  # 0: one row for all tokens
        whole = tl.load(of_scores, mask=inside, other=0.0)
    for k in tl.static_range(K):
        expert_k = tl.load(indices + token * K + k, mask=here, other=-1)
        grad_k = tl.sum(tl.where(column[None, :] == k, grad, 0.0), 1)
        whole += tl.where(expert[None, :] == expert_k[:, None], grad_k[:, None], 0.0)
    if SOFTMAX:
        whole -= tl.sum(whole * score, 1)[:, None]
    else:
        whole *= 1.0 - score
    tl.store(grad_logits + place, whole * score, mask=inside)
