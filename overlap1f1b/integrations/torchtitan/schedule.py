"""The schedule that torchtitan's trainer and validator call, with what is special to torchtitan's losses."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from overlap1f1b.engine.run.microbatch import Microbatch
from overlap1f1b.engine.run.model import MicrobatchBlock
from overlap1f1b.engine.run.replaced import replaced
from overlap1f1b.integrations import torch_pipelining


class Schedule(torch_pipelining.Schedule):
    """A pipeline schedule as torchtitan calls it, played by an engine; made by :func:`pipelining_fn`.

    Its ``loss_fn`` is torchtitan's, ``(prediction, labels, **loss_kwargs) → (loss, metrics)``.
    """

    def step(self, *args: Any, return_outputs: bool = False, **given: Any) -> Any:
        """Play the microbatches, as of torch; outputs are returned only where they are asked for."""
        # Keep the head's weights gathered, and the norm's: the loss of one open microbatch would free them for all.
        head = self._head  # what replaces it is no FSDPModule
        with replaced([(vars(self.loss_fn), "lm_head", head.__call__)] if isinstance(head, FSDPModule) else []):
            return super().step(*args, return_outputs=return_outputs, **given)

    def _blocks(self) -> dict[int, list[nn.Module]]:
        stages, head = super()._blocks(), self._head
        if head is not None and self._last in self._parts:
            self._parts[self._last].whole = (head,)
            stages[self._last].append(LossWithHead())
        return stages

    def _loss(self, loss_kwargs: Mapping[str, Any], kwargs: Mapping[str, Any], *given: Tensor) -> Tensor:
        if "positions" in kwargs and self._trains and self._last == 0:
            # On one pipeline rank torchtitan's trainer gives them to the loss.
            loss_kwargs = {"positions": kwargs["positions"], **loss_kwargs}
        return super()._loss(loss_kwargs, kwargs, *given)[0]

    @cached_property
    def _head(self) -> nn.Module | None:
        """The head that the loss calls by itself, and whose backward it runs, as torchtitan's chunked loss."""
        head = getattr(self.loss_fn, "lm_head", None)
        return head if isinstance(head, nn.Module) else None


class LossWithHead(MicrobatchBlock):
    """The block of a loss that calls the model's head by itself: behind the part, it runs once."""

    keeps = True

    def forward(self, *outputs: Tensor, microbatch: Microbatch | None = None) -> tuple[Tensor, ...]:
        """Return what the loss is given."""
        return outputs
