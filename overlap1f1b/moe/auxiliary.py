"""Auxiliary losses of routers, which are attached to the routing weights instead of added to the loss."""

from functools import reduce
from typing import Any

import torch
from torch import Tensor


def attach(weights: Tensor, loss: Tensor, scale: float) -> Tensor:
    """Return ``weights`` unchanged; their backward also starts that of a scalar ``loss``, with gradient ``scale``.

    >>> weights = attach(weights, z_loss(logits), scale=0.01)

    The total loss depends on ``weights``: the result is the gradient of *total loss + scale · loss*, on any stage and
    in any schedule. Nothing travels to the last stage, and the value of the total loss does not contain ``loss``.
    """
    return _Attach.apply(weights, loss, weights.new_full((), scale, dtype=loss.dtype))


class _Attach(torch.autograd.Function):
    """``weights``, whose backward also gives ``loss`` its gradient: the product of ``factors``, expanded."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor, *factors: Tensor) -> Tensor:
        ctx.save_for_backward(*factors)
        ctx.shape = loss.shape
        return weights.clone()  # a view must not be changed in place behind a Function

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        factors = ctx.saved_tensors
        return grads[0], reduce(torch.mul, factors).expand(ctx.shape), *(None,) * len(factors)


def attach_balance(
    weights: Tensor, probabilities: Tensor, counts: Tensor, scale: float, mask: Tensor | None = None
) -> Tensor:
    """:func:`attach` the load-balancing loss of Switch Transformers (Fedus et al. 2021, eq. 4), ``E · Σ_e f_e · P_e``.

    ``f_e`` is the fraction of all choices that chose expert ``e``, of ``counts [E]`` int64, so balanced routing gives 1
    for every K; ``P_e`` is the mean of ``probabilities [T, E]``, which sum to one for each token. Only ``P`` has a
    gradient, which is the same for all tokens, ``E · f / T``: nothing is computed but it. Tokens outside ``mask [T]``
    do not count as T.
    """
    (T, K), E = weights.shape, probabilities.shape[1]
    if mask is None:
        # Times a tensor without dimensions, in the dtype of the result, so that nothing else is launched.
        factor = scale * E / (max(T * K, 1) * max(T, 1))
        whole = torch.full((), factor, dtype=probabilities.dtype, device="cpu")
        return _Attach.apply(weights, probabilities, counts, whole)
    tokens = _number_of(mask).double()
    factors = counts, (scale * E / (tokens * K * tokens)).to(probabilities.dtype), mask.unsqueeze(1)
    return _Attach.apply(weights, probabilities, *factors)


def z_loss(logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the z-loss of ST-MoE (Zoph et al. 2022, eq. 5): the mean over T of ``logsumexp(logits [T, E])²``, or 0.

    With ``mask [T]``, True for real tokens, it is the mean over these.
    """
    squares = logits.logsumexp(-1).square()
    if mask is None:
        return squares.sum() / max(logits.shape[0], 1)
    return squares.masked_fill(~mask, 0).sum() / _number_of(mask)


def _number_of(mask: Tensor) -> Tensor:
    """Return how many tokens are real, at least 1, without a wait for the device."""
    return mask.sum().clamp(min=1)
