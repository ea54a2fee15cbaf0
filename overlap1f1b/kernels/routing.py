"""Router: logits, scores of all experts, choice of the K best, their weights, and how often each expert is chosen."""

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn

from overlap1f1b.kernels.choice import Kernels

TINY = 1e-20  # avoids 0 / 0 in the normalisation if all scores have underflowed


class Rule(NamedTuple):
    """The rule that chooses experts from logits."""

    top_k: int  # K
    softmax: bool = True  # whether scores are a softmax over the experts, instead of the sigmoid of each
    normalize: bool = False  # whether the weights of a token are divided by their sum
    scaling: float = 1.0  # factor of the weights
    groups: int = 1  # parts of equal size into which the experts are divided
    top_groups: int = 1  # groups that a token may use

    def best(self, experts: int) -> int:
        """Return how many experts are summed to rank a group: two (DeepSeek-V3), or one with softmax (DeepSeek-V2)."""
        return 1 if self.softmax else min(2, experts // self.groups)


def gate_logits(tokens: Tensor, weight: Tensor) -> Tensor:
    """Return ``tokens [T, H] @ weight [E, H].T`` in float32 (float64 of float64), under autocast too."""
    kind, dtype = tokens.device.type, tokens.dtype
    casts, plain = torch.is_autocast_enabled(kind), type(weight) in (Tensor, nn.Parameter)
    narrow = tokens.is_cuda and dtype == weight.dtype in (torch.bfloat16, torch.float16)
    if narrow and plain and not casts and not torch.compiler.is_dynamo_compiling():
        return WideProduct.apply(tokens, weight)
    wide = torch.promote_types(dtype, torch.float32)
    with torch.autocast(kind, enabled=False) if casts else nullcontext():
        return F.linear(tokens.to(wide), weight.to(wide))


class WideProduct(torch.autograd.Function):
    """``tokens @ weight.T`` of 16 bits, multiplied and kept in float32 without float32 copies of both.

    Products of two such numbers are exact in float32, so only the sum rounds. The backward multiplies in float32.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, weight)
        return torch.mm(tokens, weight.t(), out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (grad,), (tokens, weight), (of_tokens, of_weight) = grads, ctx.saved_tensors, ctx.needs_input_grad
        return (
            (grad @ weight.float()).to(tokens.dtype) if of_tokens else None,
            (grad.t() @ tokens.float()).to(weight.dtype) if of_weight else None,
        )


def count_choices_(load: Tensor, indices: Tensor) -> Tensor:
    """Add to ``load [E]`` int64 how often each expert occurs, but not −1; ``bincount`` would wait for a CUDA device."""
    flat = indices.reshape(-1)
    return load.scatter_add_(0, flat.clamp(min=0), (flat >= 0).to(flat.dtype))


def route_tokens(
    logits: Tensor, bias: Tensor, rule: Rule, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose experts by ``logits [T, E]``, float32 or wider, and ``bias [E]`` float32, added for the choice alone.

    Returns indices ``[T, K]`` int64, best first, among equal scores the lower index first; their weights ``[T, K]`` in
    ``dtype``, by default the logits'; all scores ``[T, E]``. Weights and scores are differentiable.
    """
    scores = _score(logits, rule)
    indices = _choose(scores.detach() + bias, rule)
    return indices, _weigh(scores, indices, rule).to(dtype or logits.dtype), scores


def route_in_turn(logits: Tensor, rule: Rule, mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Give each token the next K experts in turn, whatever its scores, so that the load of experts is even.

    Results are as of :func:`route_tokens`, with experts listed in turn. The groups of ``rule`` are ignored. Tokens
    outside ``mask [T]`` take no turn.
    """
    tokens, experts = logits.shape
    scores = _score(logits, rule)
    turn = torch.arange(tokens, device=logits.device) if mask is None else mask.cumsum(0) - 1
    choice = torch.arange(rule.top_k, device=logits.device)
    indices = (turn.unsqueeze(1) * rule.top_k + choice).remainder(experts)
    return indices, _weigh(scores, indices, rule), scores


def _score(logits: Tensor, rule: Rule) -> Tensor:
    return logits.softmax(-1) if rule.softmax else logits.sigmoid()


def _weigh(scores: Tensor, indices: Tensor, rule: Rule) -> Tensor:
    """Return the weights ``[T, K]`` of the chosen experts."""
    weights = scores.gather(1, indices)
    if rule.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    return weights * rule.scaling


def route_tokens_backward(
    grad_weights: Tensor, grad_scores: Tensor | None, scores: Tensor, indices: Tensor, rule: Rule
) -> Tensor:
    """Return the logits' gradient ``[T, E]`` from gradients (or None) of weights ``[T, K]`` and scores ``[T, E]``."""
    grad = grad_weights.to(scores.dtype) * rule.scaling
    if rule.normalize:
        chosen = scores.gather(1, indices)
        total = chosen.sum(-1, keepdim=True) + TINY
        grad = grad / total - ((grad * chosen).sum(-1, keepdim=True) / total) / total
    whole = torch.zeros_like(scores).scatter_(1, indices, grad)
    if grad_scores is not None:
        whole += grad_scores
    if rule.softmax:
        return scores * (whole - (whole * scores).sum(-1, keepdim=True))
    return whole * scores * (1 - scores)


def _choose(choice: Tensor, rule: Rule) -> Tensor:
    """Return indices ``[T, K]`` of the best of ``choice [T, E]`` within the best groups; overwrite ``choice``."""
    if rule.top_groups < rule.groups:
        grouped = rearrange(choice, "T (groups E) -> T groups E", groups=rule.groups)
        kept = _largest(grouped.topk(rule.best(choice.shape[1])).values.sum(-1), rule.top_groups)
        dropped = torch.ones(grouped.shape[:2], dtype=torch.bool, device=choice.device).scatter_(1, kept, False)
        choice.masked_fill_(repeat(dropped, "T groups -> T (groups E)", E=grouped.shape[2]), float("-inf"))
    return _largest(choice, rule.top_k)


def _largest(values: Tensor, count: int) -> Tensor:
    """Return indices of the ``count`` largest values of each row, largest first, among equal ones the lower index.

    ``topk`` does not define its choice among equal values, and a stable sort is slower. ``values`` is overwritten.
    """
    picks: list[Tensor] = []
    for _ in range(count):
        picks.append(values.argmax(-1, keepdim=True))
        values.scatter_(-1, picks[-1], float("-inf"))
    return torch.cat(picks, -1)


class RouteTokens(torch.autograd.Function):
    """:func:`route_tokens` with its own backward."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, bias: Tensor, rule: Rule, kernels: Kernels, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Choose the experts of each token; keep scores and choices for the backward."""
        indices, weights, scores = kernels(route_tokens, logits, bias, rule, dtype)
        ctx.save_for_backward(scores, indices)
        ctx.mark_non_differentiable(indices)
        ctx.set_materialize_grads(False)
        ctx.rule, ctx.kernels = rule, kernels
        return indices, weights, scores

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None, None, None]:
        scores, indices = ctx.saved_tensors
        _, grad_weights, grad_scores = grads
        if grad_weights is None:
            grad_weights = scores.new_zeros(indices.shape)
        args = grad_weights, grad_scores, scores, indices, ctx.rule
        return ctx.kernels(route_tokens_backward, *args), None, None, None, None


def route(
    logits: Tensor, bias: Tensor, rule: Rule, kernels: Kernels, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`route_tokens` in autograd: by Triton if ``kernels`` choose it, else by torch's own ops."""
    if kernels.uses_triton(route_tokens, logits, bias, rule, dtype):
        return RouteTokens.apply(logits, bias, rule, kernels, dtype)
    return route_tokens(logits, bias, rule, dtype)
