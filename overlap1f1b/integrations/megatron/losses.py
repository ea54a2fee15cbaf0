"""What the last stage makes of its outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from overlap1f1b.integrations.megatron.config import Config
from overlap1f1b.integrations.megatron.scalers import Scaler


class Losses:
    """The losses of a step, divided as Megatron-Core divides them, and what the user's ``loss_func`` reports.

    - ``(loss, report)``: the loss is divided by the microbatches and multiplied by the context-parallel ranks.
    - ``(loss_sum, tokens, report)``: it is divided by the microbatch's tokens and by the microbatches; with
      ``calculate_per_token_loss`` by nothing, ``finalize_model_grads_func`` being told the tokens of the step.
    - anything, where non-loss data is collected.

    Args:
        config: Of the model.
        microbatches: Of the step.
        cp: Context-parallel ranks.
        training: Whether a backward follows.
        collect: Whether ``loss_func`` gives non-loss data.
        device: Of the count of tokens.
    """

    def __init__(
        self, config: Config, microbatches: int, cp: int, *, training: bool, collect: bool, device: torch.device
    ) -> None:
        self.config, self.microbatches, self.cp = config, microbatches, cp
        self.training, self.collect = training, collect
        self.tokens = torch.zeros((), dtype=torch.int, device=device)
        self._reports: dict[int, Any] = {}

    @property
    def reports(self) -> list[Any]:
        """One for each microbatch that ended on this rank, in their order."""
        return [self._reports[microbatch] for microbatch in sorted(self._reports)]

    def scale_of(self, scaler: Scaler) -> Tensor:
        """The gradient of a loss ``[1]`` that a layer attaches: that of the main loss, but for its own factor."""
        ones, config = torch.ones(1, device=self.tokens.device), self.config
        own = getattr(config, scaler.own_scale, None)
        given = own() if own is not None else ones if config.grad_scale_func is None else config.grad_scale_func(ones)
        scale = torch.as_tensor(given, device=ones.device)
        if config.calculate_per_token_loss:
            return scale
        return (scale * self.cp if scaler.by_sequence else scale) / self.microbatches

    def of(self, microbatch: int, output: Any, loss_func: Any) -> Tensor:
        """What the backward of a microbatch starts from; a placeholder where there is none."""
        if loss_func is None:
            self._reports[microbatch] = loss = output
        elif self.collect:
            self._reports[microbatch], loss = loss_func(output, non_loss_data=True), output
        else:
            loss, self._reports[microbatch] = self._divided(loss_func(output))
        if not self.training:
            return torch.zeros(())
        scale = self.config.grad_scale_func
        return loss if scale is None else scale(loss)

    def _divided(self, returned: Any) -> tuple[Tensor, Any]:
        if not isinstance(returned, tuple | list) or len(returned) not in (2, 3):
            what = f"{len(returned)} values" if isinstance(returned, tuple | list) else type(returned).__name__
            raise ValueError(f"loss_func returns {what}; allowed: (loss, report) or (loss_sum, tokens, report)")
        if len(returned) == 2:
            loss, report = returned
            return loss * self.cp / self.microbatches, report
        loss, tokens, report = returned
        tokens = torch.as_tensor(tokens, device=self.tokens.device).detach()
        self.tokens += tokens.to(self.tokens.dtype).reshape(())
        if not self.config.calculate_per_token_loss:
            loss = loss / tokens.clamp(min=1) / self.microbatches
        return loss, report
