"""The public stage: blocks with a way to make microbatches. What the engine changes in blocks is in ``blocks.py``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from overlap1f1b.engine.run.blocks import Blocks
from overlap1f1b.engine.run.microbatch import LossFunction, Microbatch


class Stage(Blocks):
    """Consecutive blocks of a model, each an ordinary module that maps one tensor or several to one or a tuple.

    >>> stage = Stage(model, exchange)  # an nn.Sequential, or a list of modules

    Args:
        blocks: Modules in order.
        exchange: Between the ranks that share the experts; by default nothing is exchanged.
        reduce_own: Whether gradients of parameters outside the experts are summed over ranks.
        reduce_experts: Whether gradients of the experts are summed over ranks.
        number: Position of the stage in the model; it tells concurrent exchanges of several stages apart.
        first: Position of the first block in the model, for messages.
        recompute: Parts of each block that are computed a second time before their backward: see :class:`Engine`.
        parts: Parts of the tokens of each call of experts: see :class:`Engine`.
        sliced: DTensors of which the ranks that share the experts have different parts.
        device: Device of the stage's tensors; by default the first parameter's, or the CPU.

    Raises:
        ValueError: No block, one under ``DistributedDataParallel``, experts made for another exchange, or an unknown
            ``recompute``.
    """

    def microbatch(
        self,
        inputs: Tensor | Sequence[Tensor] | None = None,
        target: Tensor | Sequence[Tensor] | None = None,
        *,
        index: int = 0,
        loss_fn: LossFunction | None = None,
        loss_scale: float = 1.0,
        seed: int | None = 0,
        grad: bool = True,
        return_outputs: bool = False,
    ) -> Microbatch:
        """Return a microbatch of this stage before its forward; for the arguments see :class:`Microbatch`."""
        return Microbatch(
            self,
            index,
            inputs,
            target=target,
            loss_fn=loss_fn,
            loss_scale=loss_scale,
            seed=seed,
            grad=grad,
            return_outputs=return_outputs,
        )
