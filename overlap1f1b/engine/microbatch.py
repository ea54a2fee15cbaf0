"""One microbatch on one stage: everything that is alive between its forward and its last weight gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from overlap1f1b.engine.lanes import Flight
from overlap1f1b.engine.weights import Gradients, WeightQueue
from overlap1f1b.moe.exchange import Expected
from overlap1f1b.plan import Op
from overlap1f1b.schedule import Kind

if TYPE_CHECKING:
    from overlap1f1b.engine.cut import BlockRun
    from overlap1f1b.engine.stage import Stage

LossFunction = Callable[[Tensor, Tensor], Tensor]


class Microbatch:
    """The state of one microbatch: activations, gradients, exchanges in flight. Nothing of it is kept on a module.

    Args:
        stage: Where it runs.
        index: Its number, which orders its contributions to gradients.
        inputs: The first block's input.
        target: Second argument of ``loss_fn``.
        loss_fn: ``(output of the last block, target) → scalar``; None returns the output instead.
        loss_scale: Gradient of the step's loss by this microbatch's.
        seed: Start of its stream of random numbers.
        grad: Whether a backward follows.
    """

    def __init__(
        self,
        stage: Stage,
        index: int,
        inputs: Tensor,
        *,
        target: Tensor | None = None,
        loss_fn: LossFunction | None = None,
        loss_scale: float = 1.0,
        seed: int = 0,
        grad: bool = True,
    ) -> None:
        self.stage, self.index, self.target, self.loss_fn, self.grad = stage, index, target, loss_fn, grad
        self.loss_scale = loss_scale
        self.activation: Tensor | None = inputs
        self.input_grad: Tensor | None = None
        self.output: Tensor | None = None
        self.output_grad: Tensor | None = torch.tensor(loss_scale) if loss_fn is not None else None
        self.runs: dict[int, BlockRun] = {}
        self.queues: dict[tuple[Op, int, int], WeightQueue] = {}
        self.flights: dict[Kind, Flight] = {}
        self.expected: dict[Kind, Expected | None] = {}  # the announced receive of the next exchange, each way
        self.random = RandomStream(seed, stage.device)
        self.tied: Gradients = {}
        self.ended = False

    @property
    def forwarded(self) -> bool:
        """Whether its forward has ended and its backward has not."""
        return self.output is not None and self.grad and not self.ended

    def stop(self) -> None:
        """Unwinds suspended forwards and lets go of everything."""
        for run in self.runs.values():
            run.stop()
        self.runs.clear()
        self.queues.clear()
        self.flights.clear()
        self.expected.clear()


class RandomStream:
    """A stream of random numbers of its own: dropout does not depend on what runs in between."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[device.index or 0])
        self._seed = seed
        self._states: list[Tensor] | None = None
        self._outside: list[Tensor] = []

    def __enter__(self) -> None:
        self._outside = [generator.get_state() for generator in self._generators]
        for position, generator in enumerate(self._generators):
            if self._states is None:
                generator.manual_seed(self._seed)
            else:
                generator.set_state(self._states[position])

    def __exit__(self, *error: object) -> None:
        self._states = [generator.get_state() for generator in self._generators]
        for generator, state in zip(self._generators, self._outside, strict=True):
            generator.set_state(state)
