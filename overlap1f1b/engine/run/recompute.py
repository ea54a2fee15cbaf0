"""A block that drops activations after its forward and computes them again before its backward.

What exchanges have brought is kept: the block's input, the rows that the experts received, and those that came back.
All that lies between follows from these without another exchange:

- the experts' part from the rows that they received;
- all else from the block's input and, where it calls experts, the weighted sum of the rows that came back (where the
  experts have weighted them, the sum itself is kept instead).

The first forward runs with gradients enabled, so that it takes the same kernels and tells what has a gradient to come,
but whatever it saves is forgotten at once. The second runs in one piece, nothing suspends it. It finds what the first
found: the random numbers, the state of the thread (autocast and the like), and the scale of auxiliary losses, which in
a loop of combined steps belong to the call that runs the forward and not to the one that runs the backward.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from overlap1f1b.engine.run.block import BlockRun, SeamRun
from overlap1f1b.engine.run.microbatch import Microbatch, RandomStream, Tensors
from overlap1f1b.engine.run.suspend import SeamCall, ThreadState
from overlap1f1b.moe.auxiliary import loss_scales_of
from overlap1f1b.plan import Op


def run_of(microbatch: Microbatch, block: int) -> BlockRun:
    """The nodes of one block for one microbatch."""
    drops = microbatch.grad and microbatch.stage.shape[block].recompute != "none"
    return RecomputedRun(microbatch, block) if drops else BlockRun(microbatch, block)


def _forget(_: Tensor) -> None:
    """Saves nothing."""


def _forgotten(_: None) -> Tensor:
    raise AssertionError("what is computed again has no backward the first time")


_FORGETTING = (_forget, _forgotten)


class RecomputedRun(BlockRun):
    """The nodes of one block for one microbatch, of which a part is dropped and computed again."""

    def __init__(self, microbatch: Microbatch, block: int) -> None:
        super().__init__(microbatch, block)
        shape = self.stage.shape[block]
        self.drops_own, self.drops_experts = shape.drops(shape.own), shape.drops(Op.EXPERTS)
        self.streams: list[RandomStream] = []  # as they stood where the forward began, and behind each call of experts
        self.expert_streams: list[RandomStream] = []  # as they stood where the experts began
        self.state: ThreadState | None = None  # where the forward began
        self.loss_scales: list[float] = []  # of the block's auxiliary losses

    # ---------------------------------------------------------------------------------------------- dropping

    def _advance(self, value: Tensor | Tensors, random: RandomStream) -> SeamCall | Tensors:
        if not self.drops_own:
            return super()._advance(value, random)
        if self.state is None:
            self.state = ThreadState.capture(self.stage.device)
            self.loss_scales = [carrier.loss_scale for carrier in self.stage.carriers[self.block]]
        self.streams.append(random.again())
        with saved_tensors_hooks(*_FORGETTING):
            step = super()._advance(value, random)
        if isinstance(step, SeamCall):  # the experts may be kept
            hooks = tuple(hook for hook in step.state.hooks if hook != _FORGETTING)
            step = step._replace(state=replace(step.state, hooks=hooks))
        return step

    def _keep(self, outs: Tensors) -> None:
        if not self.drops_own:
            super()._keep(outs)
            return
        for seam in self.seams:
            seam.tokens, seam.weights = None, seam.weights.detach()
            if seam.route.keeps_returned:
                seam.y = None  # summed again
            elif seam.y is not None and seam.y._version != seam.version:
                raise ValueError(
                    f"{self.stage.names[self.block]} changes what its experts return in place, with "
                    f"recompute={self.stage.shape[self.block].recompute!r} and weights_in='activation'; allowed: a copy"
                )

    def experts_f(self, received: Tensor) -> None:
        super().experts_f(received)
        if self.drops_experts:
            self.seams[-1].result = None

    def _experts(self, seam: SeamRun, state: ThreadState, random: RandomStream) -> Tensor:
        if self.drops_experts:
            self.expert_streams.append(random.again())
            state = replace(state, hooks=(*state.hooks, _FORGETTING))
        return super()._experts(seam, state, random)

    # ---------------------------------------------------------------------------------------------- computing again

    def recompute_experts_b(self, received: None) -> None:
        seam, random = self.seams[-1], self.expert_streams.pop()
        if seam.leaf is not None:
            seam.result = get_gradient_edge(super()._experts(seam, seam.state, random))

    def recompute_attention_b(self, received: None) -> None:
        stage, state = self.stage, self.state
        assert state is not None
        with (
            state.applied(stage.names[self.block], device=stage.device, grad=True),
            loss_scales_of(stage.carriers[self.block], self.loss_scales),
        ):
            self._advance_again()

    recompute_dense_b = recompute_attention_b

    def _advance_again(self) -> None:
        """The whole forward once more, up to what it returned."""
        streams, self.streams = iter(self.streams), []
        step = super()._advance(tuple(self.x), next(streams))
        for seam, random in zip(self.seams, streams, strict=True):
            if not isinstance(step, SeamCall) or step.experts is not seam.experts:
                break
            seam.tokens, seam.weights = step.tokens, step.weights
            y = seam.y if seam.returned is None else seam.aggregate(seam.returned)
            assert y is not None
            step = super()._advance(y, random)
        else:
            if not isinstance(step, SeamCall):
                self.forward = None
                super()._keep(step)
                return
        raise ValueError(
            f"{self.stage.names[self.block]} calls other experts when it is recomputed; allowed: a forward that does "
            "the same twice"
        )
