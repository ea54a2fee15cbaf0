"""One microbatch on one stage, from its forward to its last weight gradient."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from overlap1f1b.cut.stage import Stage
from overlap1f1b.play.block import BlockRun
from overlap1f1b.play.gradients import accumulate
from overlap1f1b.play.install import Installation
from overlap1f1b.play.passage import Given, LossFunction, Passage, Phase, Transfers, tensors


def check_gradients_possible() -> None:
    """Raise a ValueError in inference mode, or in the forward of a ``DistributedDataParallel``."""
    if torch.is_inference_mode_enabled():
        raise ValueError("a step with gradients under torch.inference_mode(); allowed: outside of it, or evaluate()")
    if getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
        raise ValueError(
            "a step with gradients in the forward of a DistributedDataParallel, which sums them again, those of other "
            "ranks' experts, too; allowed: a module without it (in Lightning a strategy for one device on each rank)"
        )


class Microbatch(Passage):
    """The state of one microbatch on one stage: activations, gradients, exchanges in flight.

    Nothing of it is kept on a module, so that several microbatches can be open in one block.

    Args:
        stage: The blocks that it runs through.
        inputs: One input of the first block or several; None if the stage before passes them on.
        target: One target of ``loss_fn`` or several.
        index: Number of the microbatch; contributions to gradients are added in this order.
        loss_fn: ``(*outputs of the last block, *targets) → scalar``; without it the outputs are returned.
        loss_grad: Gradient of its loss, where its backward begins: its share of the step's loss × ``loss_scale``.
        seed: Seed of its stream of random numbers.
        grad: Whether a backward follows.
        return_outputs: Whether to keep the arguments of ``loss_fn`` that the last block returned.
        installed: The stage in the step that plays it.

    Attributes:
        runs: The run of each block between its first node and its last.
    """

    def __init__(
        self,
        stage: Stage,
        inputs: Tensor | Sequence[Tensor] | None = None,
        target: Tensor | Sequence[Tensor] | None = None,
        *,
        index: int = 0,
        loss_fn: LossFunction | None = None,
        loss_grad: float = 1.0,
        seed: int = 0,
        grad: bool = True,
        return_outputs: bool = False,
        installed: Installation | None = None,
    ) -> None:
        given = Given(tensors(target), loss_fn, loss_grad, return_outputs)
        installed, entering = installed or Installation(stage), None if inputs is None else tensors(inputs)
        super().__init__(installed, entering, given, index=index, seed=seed, grad=grad)
        self.runs: dict[int, BlockRun] = {}

    def install(self, installed: Installation) -> None:
        """Go on in another step."""
        self.installed = installed
        for run in self.runs.values():
            run.installed = installed

    def accumulate_weights(self) -> None:
        """Compute the weight gradients that the backward has left, and add them to ``.grad``."""
        if self.phase is Phase.FINISHED:
            return
        with torch.no_grad():
            for place in list(self.queues):
                accumulate(self.queues.pop(place).compute())

    def finish(self) -> None:
        """Release activations, graphs and gradients at the microbatch's last compute node; results and sends stay.

        With thousands of microbatches in a step, Python's garbage collector would else traverse all of it.
        """
        super().finish()
        del self.runs

    def stop(self) -> None:
        """Unwind suspended forwards and release everything."""
        if self.phase is Phase.FINISHED:
            return
        for run in self.runs.values():
            with suppress(Exception):  # of a block that makes an error of its own from the end of its forward
                run.stop()
        self.transfers = Transfers()
        for state in (self.runs, self.queues, self.memo):
            state.clear()
