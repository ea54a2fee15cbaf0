"""One microbatch on one stage: everything that is alive between its forward and its last weight gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from overlap1f1b.engine.run.autograd import Gradients, WeightQueue, accumulate
from overlap1f1b.plan import Op
from overlap1f1b.schedule import Kind
from overlap1f1b.transport.exchange import Expected
from overlap1f1b.transport.lanes import Flight

if TYPE_CHECKING:
    from overlap1f1b.engine.run.block import BlockRun
    from overlap1f1b.engine.run.stage import Stage

LossFunction = Callable[..., Tensor]
"""``(*outputs of the last block, *targets) → scalar``."""

Tensors = tuple[Tensor, ...]
OptionalTensors = tuple[Tensor | None, ...]


class Microbatch:
    """The state of one microbatch: activations, gradients, exchanges in flight. Nothing of it is kept on a module.

    Args:
        stage: Where it runs.
        index: Its number, which orders its contributions to gradients.
        inputs: The first block's input, or several; None if they come from the stage before.
        target: Last argument of ``loss_fn``, or several.
        loss_fn: ``(outputs of the last block, target) → scalar``; None returns the outputs instead.
        loss_scale: Gradient of the step's loss by this microbatch's.
        seed: Start of its stream of random numbers; None draws from the thread's own.
        grad: Whether a backward follows.
        keep_outputs: Whether to keep what went into ``loss_fn``.
    """

    def __init__(
        self,
        stage: Stage,
        index: int,
        inputs: Tensor | Sequence[Tensor] | None = None,
        *,
        target: Tensor | Sequence[Tensor] | None = None,
        loss_fn: LossFunction | None = None,
        loss_scale: float = 1.0,
        seed: int | None = 0,
        grad: bool = True,
        keep_outputs: bool = False,
    ) -> None:
        self.stage, self.index, self.loss_fn, self.grad = stage, index, loss_fn, grad
        self.target, self.loss_scale, self.keep_outputs = tensors(target), loss_scale, keep_outputs
        self.forwarded = self.ended = self.finished = False
        self.activations: Tensors | None = None if inputs is None else tensors(inputs)
        """Input of the next block to run: leaves, those with a gradient to come require it."""
        self.outputs: Tensors | None = None
        """What the last block returned (the loss, where there is a ``loss_fn``), until it is sent on."""
        self.differentiable: tuple[bool, ...] = ()
        """Which of the outputs have a gradient to come."""
        self.kept: Tensors = ()
        self.output_grads: OptionalTensors | None = None
        self.input_grads: OptionalTensors = ()
        self.before: Microbatch | None = None  # the same on the stage before and after, where this rank holds them
        self.after: Microbatch | None = None
        self.runs: dict[int, BlockRun] = {}
        self.queues: dict[tuple[Op, int, int], WeightQueue] = {}
        self.flights: dict[Kind, Flight[Tensor]] = {}
        self.arriving: dict[Kind, Flight[Tensors]] = {}  # from another rank's stage
        self.expected: dict[Kind, Expected | None] = {}  # the announced receive of the next exchange, each way
        self.random = RandomStream(seed, stage.generators)
        self.tied: Gradients = {}
        self.memo: dict[object, Any] = {}
        """What blocks keep for one another, see :class:`MicrobatchBlock`."""

    @property
    def output(self) -> Tensor | OptionalTensors | None:
        """The loss, or what the last block returned, detached; None before its forward has ended."""
        return one(self.outputs)

    @property
    def input_grad(self) -> Tensor | OptionalTensors | None:
        """Gradient of the input, or of each; None where it requires none."""
        return one(self.input_grads) if self.input_grads else None

    def await_input(self, kind: Kind) -> Tensor | None:
        """Waits for what the next compute node of a chain needs from other ranks; returns what an exchange brought."""
        if kind in self.arriving:
            arrived = self.arriving.pop(kind).wait()
            if kind is Kind.F:
                self.activations = arrived
            else:
                grads = iter(arrived)
                self.output_grads = tuple(next(grads) if differs else None for differs in self.differentiable)
        return self.flights.pop(kind).wait() if kind in self.flights else None

    def with_loss(self, outs: Tensors, name: str) -> Tensors:
        """What the last block, called so, has returned, or the loss of it.

        Raises:
            ValueError: A loss that is not one number, or requires no gradient.
        """
        if self.loss_fn is None:
            return outs
        if self.keep_outputs:
            self.kept = tuple(t.detach() for t in outs)
        loss = self.loss_fn(*outs, *self.target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"loss_fn returns shape {shape}; allowed: one number")
        if self.grad and not loss.requires_grad:
            raise ValueError(f"the loss of what {name} returns requires no gradient; allowed: one that does")
        if self.grad and not self.forwarded:  # else it is computed again, and another gradient may have been given
            # Filled where it is needed: a copy to a GPU would wait for it.
            self.output_grads = (torch.full_like(loss, self.loss_scale),)
        return (loss,)

    def take_passed(self, kind: Kind) -> tuple[Tensors, tuple[bool, ...]]:
        """What another rank's stage is sent, which this lets go of, and which of it will have a gradient."""
        if kind is Kind.F:
            passed, self.outputs = self.outputs, None
            assert passed is not None
            return passed, self.differentiable
        grads, self.input_grads = tuple(g for g in self.input_grads if g is not None), ()
        return grads, (False,) * len(grads)

    def take_activations(self) -> Tensors:
        """The input of the next block, which this lets go of."""
        if self.activations is None and self.before is not None:
            before, self.before = self.before, None
            passed, before.outputs = before.outputs, None
            assert passed is not None
            self.activations = tuple(t.requires_grad_(r) for t, r in zip(passed, before.differentiable, strict=True))
        taken, self.activations = self.activations, None
        assert taken is not None, f"microbatch {self.index} has no input"
        return taken

    def take_output_grads(self) -> OptionalTensors:
        """The gradients of what the next block of the backward returned, which this lets go of."""
        if self.output_grads is None and self.after is not None:
            after, self.after = self.after, None
            self.output_grads, after.input_grads = after.input_grads, ()
        taken, self.output_grads = self.output_grads, None
        assert taken is not None, f"microbatch {self.index} has no gradient of its output"
        return taken

    def accumulate_weights(self) -> None:
        """Computes the weight gradients that its backward has left, if any, and adds them to ``.grad``."""
        if self.finished:  # nothing was left
            return
        with torch.no_grad():
            for place in list(self.queues):
                accumulate(self.queues.pop(place).compute())

    def finish(self) -> None:
        """Lets go of everything but results: nothing of it is left to play but what it sends.

        With thousands of them in a step, what they kept would have Python look for garbage in all its objects.
        """
        self.finished, self.target, self.loss_fn = True, (), None
        del self.runs, self.queues, self.flights, self.arriving, self.expected, self.random, self.tied, self.memo

    def stop(self) -> None:
        """Unwinds suspended forwards and lets go of everything."""
        if self.finished:
            return
        for run in self.runs.values():
            run.stop()
        for state in (self.runs, self.queues, self.flights, self.arriving, self.expected, self.memo):
            state.clear()
        self.before = self.after = None


def absent(like: Tensor | None = None) -> Tensor:
    """Stands for an input that is not given this step, on the device of another."""
    return torch.empty(0, dtype=torch.bool, device=None if like is None else like.device)


def is_absent(tensor: Tensor) -> bool:
    """Whether it is :func:`absent`."""
    return tensor.dtype is torch.bool and tensor.shape == (0,)


def tensors(value: Tensor | Sequence[Tensor] | None) -> Tensors:
    """One tensor, several, or none, as a tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, Tensor) else tuple(value)


def one(values: tuple[Tensor | None, ...] | None) -> Tensor | tuple[Tensor | None, ...] | None:
    """A single value as it is, several as a tuple."""
    return values[0] if values is not None and len(values) == 1 else values


class MicrobatchBlock(nn.Module):
    """A block whose forward is given its microbatch, too: ``forward(*inputs, microbatch=None)``.

    In ``microbatch.memo`` the blocks of a stage keep what all of them need, such as masks and rotary embeddings; a key
    is the block's own to choose. It lasts until the microbatch has ended. ``microbatch.target`` is that of the loss.
    Without an engine there is no microbatch.

    Attributes:
        input_names: Of what the first block of a model takes, in order. A step's inputs may then be a mapping by these
            names, and an input that is not given this step is None. Any block may return None for it, to pass it on.
    """

    input_names: tuple[str, ...] = ()


class RandomStream:
    """A stream of random numbers of its own: dropout does not depend on what runs in between.

    Args:
        seed: Where it starts; without one it is the thread's stream, as it stands.
        generators: Which draw from it.
    """

    __slots__ = ("_every", "_generators", "_outside", "_seed", "_states")

    def __init__(self, seed: int | None, generators: tuple[torch.Generator, ...]) -> None:
        self._every = generators
        self._generators = () if seed is None else generators
        self._seed = seed or 0
        self._states: list[Tensor] | None = None
        self._outside: list[Tensor] = []

    def again(self) -> RandomStream:
        """A stream that gives once more what this one is about to give."""
        twin = copy(self)
        if not self._generators:
            twin._generators, twin._states = self._every, [generator.get_state() for generator in self._every]
        return twin

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
        self._outside = []


def generators_of(device: torch.device) -> tuple[torch.Generator, ...]:
    """The generators that a forward on this device may draw from."""
    if device.type != "cuda":
        return (torch.default_generator,)
    return (torch.default_generator, torch.cuda.default_generators[device.index or 0])
