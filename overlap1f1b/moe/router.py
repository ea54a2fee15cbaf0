"""The router: chooses experts for each token, and their weights."""

import math
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlap1f1b.kernels.choice import Kernels
from overlap1f1b.kernels.routing import TINY, Rule, count_choices_, gate_logits, route, route_in_turn
from overlap1f1b.moe.auxiliary import attach, attach_balance, z_loss
from overlap1f1b.schedule.values import check_kind, check_number, check_size, checked, quoted, shortened

Score = Literal["softmax", "sigmoid"]
Device = torch.device | str | int | None
"""Where parameters are made; None for torch's own choice."""


@checked
@dataclass(frozen=True)
class RouterConfig:
    """Number of experts, and the rules by which tokens choose them.

    Args:
        experts: E.
        top_k: K, experts per token.
        score: ``"softmax"`` over the experts (Switch, Mixtral, Qwen), or ``"sigmoid"`` of each (DeepSeek-V3).
        normalize: Whether the weights of a token are divided by their sum. Ignored with K = 1, where the quotient
            would be 1 and the router would have no gradient.
        scaling: Factor on the weights, after the normalisation.
        groups: Parts of equal size into which the experts are divided; a token may only use ``top_groups`` of them.
        top_groups: Groups per token.
        aux_coefficient: Factor of the load-balancing loss, 0 for none.
        z_coefficient: Factor of the z-loss, 0 for none.
        force_load_balance: Whether tokens take experts in turn, whatever their scores: for measurements of throughput
            with an even load, as Megatron-Core's ``moe_router_force_load_balancing``. Weights are still the scores of
            the experts taken; groups are ignored.

    Raises:
        ValueError: A value is not allowed.
    """

    experts: int
    top_k: int
    score: Score = "softmax"
    normalize: bool = True
    scaling: float = 1.0
    groups: int = 1
    top_groups: int = 1
    aux_coefficient: float = 0.0
    z_coefficient: float = 0.0
    force_load_balance: bool = False

    def __post_init__(self) -> None:
        for name in ("experts", "top_k", "groups", "top_groups"):
            check_size(name, getattr(self, name))
        if self.experts % self.groups:
            allowed = ", ".join(str(n) for n in range(1, self.experts + 1) if self.experts % n == 0)
            raise ValueError(f"{self.experts} experts cannot be divided into groups={self.groups}; allowed: {allowed}")
        if not 1 <= self.top_groups <= self.groups:
            raise ValueError(f"top_groups={self.top_groups} of {self.groups} groups; allowed: 1 to {self.groups}")
        available = self.top_groups * self.experts // self.groups
        if not 1 <= self.top_k <= available:
            within = f" in {self.top_groups} of {self.groups} groups" if self.groups > 1 else ""
            raise ValueError(f"top_k={self.top_k} of {available} experts{within}; allowed: 1 to {available}")
        check_number("scaling", self.scaling, above=True)
        for name in ("aux_coefficient", "z_coefficient"):
            check_number(name, getattr(self, name))

    @property
    def rule(self) -> Rule:
        """The rule of the choice, without losses."""
        normalize = self.normalize and self.top_k > 1
        return Rule(self.top_k, self.score == "softmax", normalize, self.scaling, self.groups, self.top_groups)


def check_tokens(tokens: object, hidden: int) -> None:
    """Raise ``ValueError`` for what is no tensor of floating tokens ``[…, H]``."""
    if not isinstance(tokens, Tensor):
        raise ValueError(f"tokens of type {type(tokens).__name__}; allowed: a tensor [..., {hidden}]")
    if tokens.dim() < 2 or tokens.shape[-1] != hidden or not tokens.is_floating_point():
        raise ValueError(f"tokens {tokens.dtype} {[*tokens.shape]}; allowed: floating [..., {hidden}]")


def check_factory(dtype: torch.dtype | None, device: Device) -> None:
    """Raise ``ValueError`` for a dtype that no trained parameter has, or a device that torch cannot use."""
    check_kind("dtype", dtype, torch.dtype, None)
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype={dtype}; allowed: a floating one, such as torch.bfloat16")
    check_kind("device", device, torch.device, str, int, None)
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError, TypeError) as error:
        why = shortened(str(error).partition("\n")[0])
        raise ValueError(f"device={quoted(device)}: {why}; allowed: a torch.device, or its name") from None


class Router(nn.Module):
    """Router: scores all experts for each token and chooses the K best.

    >>> router = Router(64, RouterConfig(experts=8, top_k=2))
    >>> indices, weights = router(tokens)  # [T, H] → [T, K] int64, [T, K] in the tokens' dtype

    Scores and the gate's product are computed in float32 (float64 for float64 tokens), under autocast too. A token's
    experts are listed best first. Among equal scores every device takes the first, so all ranks make the same choice.

    >>> indices, weights = router(tokens, mask)  # bool [T], or [B, S] of B · S = T tokens: True for real tokens

    All other tokens, as of padding, get expert −1, which is none, with weights of 0. They have no gradient, and count
    neither in ``load`` nor in a loss, whatever their values are.

    In training mode choices are counted in ``load``, if gradients are on, and auxiliary losses are attached to the
    weights, times ``aux_scale``. One forward sees one microbatch on one rank: for the mean over all microbatches and
    ranks, the scale is 1 / (microbatches · ranks with different tokens), times the factor of a gradient scaler. The
    engine sets it in each step; a plain training loop calls :func:`set_auxiliary_scale`. The forward reads it, so a
    later change does not affect microbatches that still wait for their backward.

    Balance without an auxiliary loss comes from ``correction_bias`` (Wang et al. 2024; DeepSeek-V3, 2.1.2), which is
    added to the scores for the choice but not to the weights. It is zero until :meth:`update_correction_bias`:

    >>> for module in model.modules():  # once a step, on all ranks
    ...     if isinstance(module, Router):
    ...         module.update_correction_bias(0.001)

    Args:
        hidden: H.
        config: Number of experts and rules of the choice.
        dtype: Dtype of the gate's weight.
        device: Device of parameters and buffers.
    """

    correction_bias: Tensor
    load: Tensor
    aux_scale: float = 1.0

    @checked
    def __init__(
        self, hidden: int, config: RouterConfig, *, dtype: torch.dtype | None = None, device: Device = None
    ) -> None:
        super().__init__()
        check_size("hidden", hidden)
        check_factory(dtype, device)
        self.config, self.kernels = config, Kernels()
        self.gate = nn.Linear(hidden, config.experts, bias=False, dtype=dtype, device=device)
        self.register_buffer("correction_bias", torch.zeros(config.experts, dtype=torch.float32, device=device))
        # The load is not in checkpoints: it counts this rank's choices alone.
        load = torch.zeros(config.experts, dtype=torch.int64, device=device)
        self.register_buffer("load", load, persistent=False)
        self._add_up: weakref.WeakMethod[Callable[[Tensor], object]] | None = None

    def share(self, add_up: Callable[[Tensor], object]) -> None:
        """Take a method that adds up a tensor in place over all ranks that hold this router, while its object lives.

        An engine gives its own. Copies of the router have none.
        """
        self._add_up = weakref.WeakMethod(add_up)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_add_up": None}

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return experts ``[T, K]`` and weights ``[T, K]`` of ``tokens [T, H]``; in training count the load."""
        check_tokens(tokens, self.gate.weight.shape[-1])
        rule, dtype = self.config.rule, tokens.dtype
        if mask is not None:
            mask = flat_mask(mask, tokens)
            tokens = blanked(tokens, mask)
        logits = gate_logits(tokens, self.gate.weight)
        if self.config.force_load_balance:
            indices, weights, scores = route_in_turn(logits, rule, mask)
            weights = weights.to(dtype)
        else:
            indices, weights, scores = route(logits, self.correction_bias, rule, self.kernels, dtype)
        if mask is not None:
            indices, weights = indices.masked_fill(~mask.unsqueeze(1), -1), blanked(weights, mask)
        if self.training and torch.is_grad_enabled():  # an evaluation of a model in training mode counts nothing
            self.kernels(count_choices_, self.load, indices)
            weights = self._attach_losses(weights, logits, scores, indices, mask)
        return indices, weights

    def _attach_losses(
        self, weights: Tensor, logits: Tensor, scores: Tensor, indices: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Let the gradients of the auxiliary losses enter at the weights, which are returned."""
        aux, z = self.config.aux_coefficient, self.config.z_coefficient
        if aux:
            counts = self.kernels(count_choices_, torch.zeros_like(self.load), indices)
            softmax = self.config.score == "softmax"
            probabilities = scores if softmax else scores / (scores.sum(-1, keepdim=True) + TINY)
            weights = attach_balance(weights, probabilities, counts, aux * self.aux_scale, mask)
        if z:
            weights = attach(weights, z_loss(logits, mask), z * self.aux_scale)
        return weights

    @checked
    @torch.no_grad()
    def update_correction_bias(self, rate: float, group: dist.ProcessGroup | None = None) -> None:
        """Move the bias of each expert by ``rate``: up if its load was below the mean, down if above.

        The load counts choices since the last update. It is summed over the ranks of ``group``, by default over all
        that hold this router in an engine, and then reset to zero. All of them must call this. Outside an engine nobody
        knows these ranks: without a group the load is this rank's, which several ranks are warned of.
        """
        check_number("rate", rate, -math.inf)
        add_up = self._add_up and self._add_up()
        if group is not None:
            dist.all_reduce(self.load, group=group)
        elif add_up:
            add_up(self.load)
        elif dist.is_initialized() and dist.get_world_size() > 1 and self.load.any():
            warnings.warn(
                "update_correction_bias by the choices of this rank alone, outside an engine; allowed: group=the ranks "
                "that hold the router, or ranks would route differently",
                stacklevel=2,
            )
        missing = self.load.sum() - self.load * self.config.experts  # in integers, so exact
        self.correction_bias.add_(missing.sign(), alpha=rate)
        self.load.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # The bias stays float32: `model.bfloat16()` would round it to steps larger than its updates.
        bias = self.correction_bias
        super()._apply(fn, recurse)
        if self.correction_bias.dtype.itemsize < torch.float32.itemsize:
            self.correction_bias = bias.to(self.correction_bias.device)
        return self

    def extra_repr(self) -> str:
        return str(self.config)


def flat_mask(mask: Tensor, x: Tensor) -> Tensor:
    """Return the mask ``[T]`` of ``x [T, H]`` or ``[B, S, H]``; ValueError for another shape, dtype or device."""
    shape, tokens = x.shape[:-1], x.shape[:-1].numel()
    found, other = quoted(mask), f"{list(shape)}" if len(shape) > 1 else f"[B, S] with B · S = {tokens}"
    if isinstance(mask, Tensor):
        fits = mask.shape in (shape, (tokens,)) or (len(shape) == 1 and mask.dim() == 2 and mask.numel() == tokens)
        if fits and mask.dtype == torch.bool and mask.device == x.device:
            return mask.reshape(tokens)
        found = f"{mask.dtype} {list(mask.shape)} on {str(mask.device)!r}"
    raise ValueError(
        f"mask {found} of tokens {list(x.shape)}; allowed: torch.bool [{tokens}] or {other} on {str(x.device)!r}, True "
        "for real tokens"
    )


def blanked(tokens: Tensor, mask: Tensor) -> Tensor:
    """Return ``tokens [T, …]`` with zeros outside ``mask [T]``, through which no gradient flows."""
    return tokens.masked_fill(~mask.unsqueeze(1), 0)


@checked
def set_auxiliary_scale(model: Any, scale: float) -> None:
    """Set ``aux_scale`` of every router in ``model``, a module or an engine.

    >>> set_auxiliary_scale(model, 1 / (microbatches * ranks))
    >>> for tokens, labels in batch:
    ...     (loss_fn(model(tokens), labels) / microbatches).backward()  # auxiliary gradients included
    """
    check_number("scale", scale, -math.inf)
    if not isinstance(model, nn.Module) and not hasattr(model, "modules"):
        check_kind("model", model, nn.Module)
    for module in model.modules():
        if isinstance(module, Router):
            module.aux_scale = scale
