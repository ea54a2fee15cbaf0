"""One microbatch on one stage, from its forward to its last weight gradient."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch.nn.parallel import DistributedDataParallel

from overlap1f1b.play.block import BlockRun
from overlap1f1b.play.gradients import accumulate
from overlap1f1b.play.install import Installation
from overlap1f1b.play.offload import Leaving
from overlap1f1b.play.passage import Passage, Phase, Transfers


def check_gradients_possible() -> None:
    """Raise a ValueError in inference mode, a transform of torch.func, or a ``DistributedDataParallel``'s forward."""
    if torch.is_inference_mode_enabled():
        raise ValueError("a step with gradients under torch.inference_mode(); allowed: outside of it, or evaluate()")
    if torch._C._are_functorch_transforms_active():
        raise ValueError("a step inside a transform of torch.func, such as grad; allowed: outside of it")
    if getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
        raise ValueError(
            "a step with gradients in the forward of a DistributedDataParallel, which sums them again, those of other "
            "ranks' experts, too; allowed: a module without it (in Lightning a strategy for one device on each rank)"
        )


class Microbatch(Passage):
    """The state of one microbatch on one stage: activations, gradients, exchanges in flight, runs of blocks.

    Nothing of it is kept on a module, so that several microbatches can be open in one block.
    """

    runs: dict[int, BlockRun]

    def leaving(self, block: int) -> Leaving | None:
        """Return what the run of a block has left that may leave to host memory."""
        run = self.runs.get(block)
        return None if run is None else run.leaving

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
