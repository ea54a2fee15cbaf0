"""A model chunk as blocks of a stage: the user's forward step, suspended before each layer and behind the last."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from greenlet import getcurrent
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from overlap1f1b.engine.run.microbatch import Tensors
from overlap1f1b.engine.run.suspend import Forward, SeamCall, ThreadState
from overlap1f1b.integrations.megatron.config import Config, found
from overlap1f1b.integrations.megatron.layers import parts_of
from overlap1f1b.integrations.megatron.losses import Losses
from overlap1f1b.integrations.megatron.reach import Reach


@dataclass
class Step:
    """What one call brings for a chunk.

    Args:
        forward_step_func: ``(data_iterator, model) → (output, loss_func)``.
        data_iterator: Of the chunk.
        config: Of the model.
        losses: Where the last stage's outputs go.
        marks_first: Whether the model is told of its first microbatch.
        begun: Microbatches whose forward has begun.
    """

    forward_step_func: Callable[..., Any]
    data_iterator: Any
    config: Config
    losses: Losses
    marks_first: bool
    begun: int = 0


@dataclass
class _Run:
    """A microbatch's forward, which lives as long as it is suspended between two parts."""

    forward: Forward
    segment: int = 0
    reach: Reach | None = None


class Chunk:
    """The forwards of one model chunk.

    Args:
        model: Has ``set_input_tensor``, perhaps inside of what wraps it.
        layers: Modules at which the forward is cut: see :func:`parts_of`.
        stage: Its number in the pipeline.
        last: Whether the loss is made here.
        passes_last_input: Whether the last of its inputs is handed on behind its output (the encoder's, in a decoder).

    Raises:
        ValueError: A model without ``set_input_tensor``, or layers that are not in it.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[nn.Module], *, stage: int, last: bool, passes_last_input: bool = False
    ) -> None:
        self.set_input_tensor = found(model, "set_input_tensor")
        if self.set_input_tensor is None:
            raise ValueError(
                f"a model chunk of type {type(model).__name__} without set_input_tensor; allowed: with one"
            )
        self.model, self.stage, self.last, self.passes_last_input = model, stage, last, passes_last_input
        parameter = next(model.parameters(), None)
        self.device = torch.device("cpu") if parameter is None else parameter.device
        self.name = f"chunk of stage {stage} ({type(model).__name__})"
        self.parts = parts_of(model, layers, ends=last)
        self.segments = [Segment(self, index, part.held) for index, part in enumerate(self.parts)]
        self.step: Step | None = None
        self.running = 0
        """The microbatch of the node that is played."""
        self._runs: dict[int, _Run] = {}
        self._checked = len(self.segments) == 1

    @contextmanager
    def stepping(self, step: Step) -> Iterator[None]:
        """While it lasts, the chunk's forwards are those of a step, and its layers suspend them."""
        self.step = step
        hooks = [
            part.cut.register_forward_hook(partial(self._cut_behind, index))
            if part.behind
            else part.cut.register_forward_pre_hook(partial(self._cut_before, index), with_kwargs=True)
            for index, part in enumerate(self.parts)
            if part.cut is not None
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            state = ThreadState.capture(self.device)
            for run in self._runs.values():  # after a failure
                run.forward.stop()
            state.restore(ThreadState.capture(self.device), self.name)
            self._runs, self.step = {}, None

    def run(self, segment: int, inputs: Tensors) -> Tensors | Tensor:
        """The part of the running microbatch's forward up to the next cut, or to its end."""
        microbatch = self.running
        if len(self.segments) == 1:
            return self._forward_step(microbatch, inputs)
        if segment == 0:
            forward = Forward(self._forward_step, self.name, self.device)
            run = self._runs[microbatch] = _Run(forward, reach=None if self._checked else Reach(self.name))
            handed = forward.start(microbatch, inputs)
        else:
            run = self._runs[microbatch]
            run.segment = segment
            handed = run.forward.resume(inputs)
        while isinstance(handed, SeamCall):
            self._check(run, (handed.tokens, handed.weights))
            outer = getcurrent().parent
            if outer is None:  # a block without experts of its own
                raise ValueError(f"{self.name} calls experts outside of the layer that holds them; allowed: inside")
            y = outer.switch(handed)  # in the state that the inner forward has restored: the outer one's own
            if run.reach is not None:
                run.reach.passed((y,))
            handed = run.forward.resume(y)
        if run.forward.dead and segment < len(self.parts) - 1:
            raise ValueError(
                f"{self.name} ends after {self.parts[segment].name}, without {self.parts[segment + 1].name}; "
                "allowed: to call each layer once, or layers=lambda chunk: [] for a chunk that is not cut"
            )
        self._check(run, (handed,) if isinstance(handed, Tensor) else handed)
        if run.reach is not None:
            run.reach.leave(inputs)
        if run.forward.dead:
            del self._runs[microbatch]
            self._checked |= torch.is_grad_enabled()
        return handed

    def _check(self, run: _Run, outs: Sequence[Tensor]) -> None:
        if run.reach is not None:
            run.reach.check(outs, self.parts, run.segment)

    def _cut_before(self, index: int, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        """Leaves the forward before a layer, which goes on with new leaves for the tensors that it is given."""
        return self._cut(index, (args, kwargs), f"calls its layer of type {type(layer).__name__} without a tensor")

    def _cut_behind(self, index: int, layer: nn.Module, args: Any, output: Any) -> Any:
        """Leaves the forward behind a layer, with new leaves for the tensors that it returns."""
        return self._cut(index, output, f"has a last layer of type {type(layer).__name__} that returns no tensor")

    def _cut(self, index: int, passed: Any, without: str) -> Any:
        run = self._runs.get(self.running)
        if run is None or getcurrent() is not run.forward:  # called by itself, or recomputed in a backward
            return None
        if index != run.segment + 1:
            raise ValueError(
                f"{self.name} comes to {self.parts[index].name} after {self.parts[run.segment].name}; "
                "allowed: each layer once, in order, or layers=lambda chunk: [] for a chunk that is not cut"
            )
        values, spec = tree_flatten(passed)
        at = [position for position, value in enumerate(values) if isinstance(value, Tensor)]
        if not at:
            raise ValueError(f"{self.name} {without}; allowed: one or more, or layers=lambda chunk: []")
        given = tuple(_output(values[position]) for position in at)
        leaves = run.forward.hand_out(given, ThreadState.capture(self.device))
        for position, leaf in zip(at, leaves, strict=True):
            values[position] = leaf
        return tree_unflatten(values, spec)

    def _forward_step(self, microbatch: int, inputs: Tensors) -> Any:
        step = self.step
        assert step is not None
        assert step.begun == microbatch, "a plan begins the microbatches of a stage in their order"
        step.begun += 1
        mark = found(self.model, "set_is_first_microbatch")
        if microbatch == 0 and step.marks_first and mark is not None:
            mark()
        self.set_input_tensor(list(inputs) if inputs else [None])
        config = step.config
        with torch.autocast(self.device.type, config.autocast_dtype) if config.enable_autocast else nullcontext():
            try:
                output, loss_func = step.forward_step_func(step.data_iterator, self.model)
            except StopIteration:
                raise ValueError(
                    f"the data iterator of {self.name} ends before microbatch {microbatch}; "
                    f"allowed: one that gives {step.losses.microbatches} or more"
                ) from None
            if self.last:
                return step.losses.of(microbatch, output, loss_func)
        outputs = tuple(output) if isinstance(output, list | tuple) else (output,)
        if self.passes_last_input:
            outputs += (inputs[-1],)
        return tuple(_output(out) if isinstance(out, Tensor) else out for out in outputs)


class Segment(nn.Module):
    """One block of a stage: a chunk's forward from one cut to the next."""

    def __init__(self, chunk: Chunk, index: int, held: nn.Module) -> None:
        super().__init__()
        self.chunk, self.index, self.held = chunk, index, held

    def forward(self, *inputs: Tensor) -> Tensors | Tensor:
        return self.chunk.run(self.index, inputs)


def _output(tensor: Tensor) -> Tensor:
    """A tensor that the engine can take for computed: an input that is handed on is one of its own leaves."""
    return tensor.view_as(tensor) if tensor.requires_grad and tensor.is_leaf else tensor
