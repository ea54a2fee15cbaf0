"""A block that drops activations after its forward and computes them again before its backward.

The block's input and all exchanged rows are kept: the rows that the experts received, and the rows that came back.
Everything else is computed from these without another exchange:

- inside the experts, from the rows that they received;
- outside, from the block's input and the weighted sum of the rows that came back (if the experts apply the weights,
  the sum itself is kept).

The first forward runs with gradients enabled, so that it takes the same kernels and shows which outputs require a
gradient, but everything that autograd saves is dropped at once. The second forward is not suspended. It gets the same
random numbers, the same state of the thread (such as autocast), and the same scale of auxiliary losses as the first:
in a loop of combined steps these belong to the call that runs the forward, not to the call that runs the backward.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from overlap1f1b.engine.run.block import BlockRun, SeamRun
from overlap1f1b.engine.run.microbatch import Microbatch, Tensors
from overlap1f1b.engine.run.random import RandomStream
from overlap1f1b.engine.run.suspend import SeamCall, ThreadState
from overlap1f1b.moe.auxiliary import loss_scales_of
from overlap1f1b.plan import Op


def _forget(_: Tensor) -> None:
    """Save nothing."""


def _forgotten(_: None) -> Tensor:
    raise AssertionError("the first of two forwards has no backward")


_FORGETTING = (_forget, _forgotten)


class RecomputedRun(BlockRun):
    """The nodes of one block for one microbatch, with parts that are dropped and computed again."""

    def __init__(self, microbatch: Microbatch, block: int) -> None:
        super().__init__(microbatch, block)
        shape = self.stage.shape[block]
        self.drops_own, self.drops_experts = shape.drops(shape.own), shape.drops(Op.EXPERTS)
        self.streams: list[RandomStream] = []  # at the start of the forward, and behind each call of experts
        self.expert_streams: list[RandomStream] = []  # at the start of the experts
        self.state: ThreadState | None = None  # at the start of the forward
        self.loss_scales: list[float] = []  # of auxiliary losses

    # ---------------------------------------------------------------------------------------------- dropping

    def _advance(self, value: Tensor | Tensors, random: RandomStream) -> SeamCall | Tensors:
        if not self.drops_own:
            return super()._advance(value, random)
        if self.state is None:
            self.state = ThreadState.capture(self.stage.device)
            self.loss_scales = [carrier.loss_scale for carrier in self.stage.carriers[self.block]]
        self.streams.append(random.again())
        with saved_tensors_hooks(*_FORGETTING):
            reached = super()._advance(value, random)
        if isinstance(reached, SeamCall):  # the experts may be kept
            hooks = tuple(hook for hook in reached.state.hooks if hook != _FORGETTING)
            reached = reached._replace(state=replace(reached.state, hooks=hooks))
        return reached

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
                    f"{self.name} changes the result of its experts in place, with "
                    f"recompute={self.stage.shape[self.block].recompute!r} and weights_in='activation'; allowed: a copy"
                )

    def experts_f(self, received: Tensor) -> None:
        super().experts_f(received)
        if self.drops_experts:
            self.seams[-1].result = None

    def _run_experts(self, seam: SeamRun, state: ThreadState, random: RandomStream) -> Tensor:
        if self.drops_experts:
            self.expert_streams.append(random.again())
            state = replace(state, hooks=(*state.hooks, _FORGETTING))
        return super()._run_experts(seam, state, random)

    # ---------------------------------------------------------------------------------------------- computing again

    def recompute_experts(self) -> None:
        """Compute the experts again from the rows that they received."""
        seam, random = self.seams[-1], self.expert_streams.pop()
        if seam.leaf is not None:
            seam.result = get_gradient_edge(super()._run_experts(seam, seam.state, random))

    def recompute_attention(self) -> None:
        """Compute everything outside the experts again, from the block's input."""
        stage, state = self.stage, self.state
        assert state is not None
        with (
            state.applied(self.name, device=stage.device, grad=True),
            loss_scales_of(stage.carriers[self.block], self.loss_scales),
        ):
            self._advance_again()

    def _advance_again(self) -> None:
        """Run the whole forward a second time and keep its graph."""
        streams, self.streams = iter(self.streams), []
        reached = super()._advance(tuple(self.x), next(streams))
        for seam, random in zip(self.seams, streams, strict=True):
            if not isinstance(reached, SeamCall) or reached.experts is not seam.experts:
                break
            seam.tokens, seam.weights = reached.tokens, reached.weights
            y = seam.y if seam.returned is None else seam.aggregate(seam.returned)
            assert y is not None
            reached = super()._advance(y, random)
        else:
            if not isinstance(reached, SeamCall):
                self.forward = None
                super()._keep(reached)
                return
        raise ValueError(
            f"{self.name} calls other experts when it is recomputed; allowed: a forward that repeats its calls"
        )
