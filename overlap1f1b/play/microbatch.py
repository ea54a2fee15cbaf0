"""One microbatch on one stage, from its inputs to its last weight gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from overlap1f1b.cut.stage import Stage
from overlap1f1b.plan import Op, Place
from overlap1f1b.play.gradients import Gradients, WeightQueue, accumulate
from overlap1f1b.play.install import Installation
from overlap1f1b.play.offload import BlockOffload
from overlap1f1b.play.random import RandomStream
from overlap1f1b.schedule import Kind
from overlap1f1b.schedule.values import check_kind, check_number, quoted
from overlap1f1b.transport.exchange import Transfer
from overlap1f1b.transport.lanes import Flight

LossFunction = Callable[..., Tensor]
"""``(*outputs of the last block, *targets) → scalar``."""

Tensors = tuple[Tensor, ...]
OptionalTensors = tuple[Tensor | None, ...]


def check_call(
    error: TypeError, function: Callable[..., Any], name: str, allowed: str, *values: Any, **kwargs: Any
) -> None:
    """Raise ``ValueError`` if ``error`` comes from a user's function that does not take what it is given."""
    try:
        takes = signature(function)
    except ValueError:  # it has none
        return
    try:
        takes.bind(*values, **kwargs)
    except TypeError as reason:
        raise ValueError(f"{name} is given {len(values)} tensor(s): {reason}; allowed: {allowed}") from error


def check_loss(loss_fn: object, what: str = "loss_fn") -> None:
    """Raise ``ValueError`` for what is no loss: a class of losses is none, its objects are."""
    check_kind(what, loss_fn, Callable, None)
    if isinstance(loss_fn, type):
        name = loss_fn.__name__
        raise ValueError(f"{what}={name}, a class; allowed: a function, or an object such as {name}()")


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


def checked_tensors(name: str, value: Any, *also: None) -> list[Any]:
    """Return one tensor or several as a list; raise ``ValueError`` for others. ``also`` may be None."""
    several = list(value) if isinstance(value, tuple | list) else [value]
    if not all(isinstance(one, Tensor) or one in also for one in several):
        raise ValueError(f"{name}={quoted(value)}; allowed: a tensor or several")
    return several


def name_call(error: Exception, name: str, *values: Tensor) -> None:
    """Let torch's own error, which does not say where it was raised, begin with what was called."""
    if type(error) in (IndexError, RuntimeError):
        forms = ", ".join(f"{one.dtype} {list(one.shape)}" for one in values)
        error.args = (f"{name} is given {forms}: {error}",)


class Objective(NamedTuple):
    """The loss of a microbatch, and where its backward begins.

    Args:
        target: Targets of ``loss_fn``.
        loss_fn: ``(*outputs of the last block, *targets) → scalar``; without it the outputs are returned.
        loss_grad: Gradient of its loss, where its backward begins: its share of the step's loss × ``loss_scale``.
        return_outputs: Whether to keep the arguments of ``loss_fn`` that the last block returned.
    """

    target: Tensors = ()
    loss_fn: LossFunction | None = None
    loss_grad: float = 1.0
    return_outputs: bool = False


class Returned(NamedTuple):
    """What is known of the outputs of the last block.

    Args:
        requires_grad: Whether each will get a gradient.
        kept: Arguments of ``loss_fn``, if ``return_outputs``.
    """

    requires_grad: tuple[bool, ...] = ()
    kept: Tensors = ()


class Phase(IntEnum):
    """What of a microbatch is still to come, on one stage."""

    FORWARD = 0
    BACKWARD = 1
    WEIGHTS = 2
    """Weight gradients alone, if any; also after an evaluation's forward."""
    FINISHED = 3
    """Nothing; results and sends stay."""


class Transfers:
    """What a microbatch has in flight.

    Attributes:
        exchanges: Of rows, each way.
        receives: What another rank's stage sends, each way.
        announced: Receives that were posted ahead, by their tags.
        beside: The microbatch on the stage before, for F, and after, for I, where this rank holds them.
    """

    def __init__(self) -> None:
        self.exchanges: dict[Kind, dict[Place, Flight[Any]]] = {Kind.F: {}, Kind.I: {}}
        self.receives: dict[Kind, Flight[Tensors]] = {}
        self.announced: dict[int, Transfer[Tensor] | None] = {}
        self.beside: dict[Kind, Microbatch] = {}


class Microbatch:
    """The state of one microbatch on one stage: activations, gradients, exchanges in flight, runs of blocks.

    Nothing of it is kept on a module, so that several microbatches can be open in one block.

    Args:
        stage: The blocks that it runs through.
        inputs: One input of the first block or several; None if the stage before passes them on.
        target: One target of ``loss_fn`` or several.
        index: Number of the microbatch; contributions to gradients are added in this order.
        loss_fn, loss_grad, return_outputs: See :class:`Objective`.
        seed: Seed of its stream of random numbers.
        grad: Whether a backward follows.
        installed: The stage in the step that plays it.

    Attributes:
        phase: What is still to come.
        activations: Inputs of the next block: leaves, which require a gradient where one will come. After the last
            block its outputs, or the loss if there is a ``loss_fn``, until they are sent on.
        returned: What is known of the outputs of the last block.
        gradients: Of the outputs of the block whose backward is next; in the end of the inputs. None while they are
            not here, () once they were taken.
        queues: Weight gradients that a backward has left, by (op, block, call of experts).
        tied: Gradients of parameters that blocks share, summed until the first of these blocks adds them.
        random: Its stream of random numbers.
        memo: Values that blocks share, see :class:`~overlap1f1b.cut.blocks.MicrobatchBlock`.
        runs: The :class:`~overlap1f1b.play.block.BlockRun` of each block between its first node and its last.
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
        if installed is None:  # a user's own
            check_kind("stage", stage, Stage)
            check_loss(loss_fn)
            check_number("loss_grad", loss_grad, -math.inf)
            for name, value in (("inputs", inputs), ("target", target)):
                if value is not None:
                    checked_tensors(name, value)
        self.installed = installed or Installation(stage)
        self.objective = Objective(tensors(target), loss_fn, loss_grad, return_outputs)
        self.index, self.grad = index, grad
        self.activations: Tensors | None = None if inputs is None else tensors(inputs)
        self.phase = Phase.FORWARD
        self.returned = Returned()
        self.gradients: OptionalTensors | None = None
        self.queues: dict[tuple[Op, int, int], WeightQueue] = {}
        self.tied: Gradients = {}
        self.transfers = Transfers()
        self.random = RandomStream(seed, stage.draws.generators)
        self.memo: dict[object, Any] = {}
        self.runs: dict[int, Any] = {}

    @property
    def stage(self) -> Stage:
        """The blocks that it runs through."""
        return self.installed.stage

    @property
    def target(self) -> Tensors:
        """Targets of its loss."""
        return self.objective.target

    @property
    def outputs(self) -> Tensors | None:
        """The loss or the last block's outputs, detached, until they are sent on; None before the forward has ended."""
        return None if self.phase is Phase.FORWARD else self.activations

    @property
    def output(self) -> Tensor | OptionalTensors | None:
        """:attr:`outputs`, or a single one by itself."""
        return unwrapped(self.outputs)

    @property
    def input_grads(self) -> OptionalTensors:
        """Gradients of the inputs, None for one that requires none; empty before the backward has ended."""
        return (self.gradients or ()) if self.phase >= Phase.WEIGHTS else ()

    @property
    def input_grad(self) -> Tensor | OptionalTensors | None:
        """:attr:`input_grads`, or a single one by itself; None for none."""
        return unwrapped(self.input_grads) if self.input_grads else None

    def follow(self, before: Microbatch) -> None:
        """Take the inputs from the same microbatch on the stage before, and give it their gradients."""
        self.transfers.beside[Kind.F] = before
        if before.phase is not Phase.FINISHED:
            before.transfers.beside[Kind.I] = self

    def await_input(self, kind: Kind) -> None:
        """Wait for the tensors that the next compute node needs from another rank's stage."""
        arrived = self.transfers.receives.pop(kind).wait()
        if kind is Kind.F:
            self.activations = arrived
        else:
            grads = iter(arrived)
            self.gradients = tuple(next(grads) if required else None for required in self.returned.requires_grad)

    def with_loss(self, outs: Tensors, name: str) -> Tensors:
        """Return the outputs of the last block, ``name``, or the loss if there is a ``loss_fn``."""
        target, loss_fn = self.objective.target, self.objective.loss_fn
        if loss_fn is None:
            return outs
        if self.objective.return_outputs:
            self.returned = Returned(kept=tuple(t.detach() for t in outs))
        arguments = *outs, *target
        try:
            loss = loss_fn(*arguments)
        except TypeError as error:
            allowed = "one argument for each output of the last block and each target"
            check_call(error, getattr(loss_fn, "forward", loss_fn), "loss_fn", allowed, *arguments)
            raise
        except (IndexError, RuntimeError) as error:
            name_call(error, "loss_fn", *arguments)
            raise
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a value of {type(loss).__name__}"
            raise ValueError(f"loss_fn returns {found}; allowed: one number")
        if loss.is_complex():
            raise ValueError(f"loss_fn returns a number of {loss.dtype}; allowed: a real one")
        if self.grad and not loss.requires_grad:
            raise ValueError(f"the loss of {name}'s outputs requires no gradient; allowed: a loss that depends on them")
        if self.grad and self.phase is Phase.FORWARD:  # a second forward must not replace a gradient given since
            # Filled on its device: a copy to a GPU would wait for the device.
            self.gradients = (torch.full_like(loss, self.objective.loss_grad),)
        return (loss,)

    def end_forward(self, outputs: Tensors, requires_grad: tuple[bool, ...]) -> None:
        """Take the outputs of the last block, and whether each will get a gradient."""
        self.activations, self.phase = outputs, Phase.BACKWARD
        self.returned = Returned(requires_grad, self.returned.kept)

    def take_passed(self, kind: Kind) -> tuple[Tensors, tuple[bool, ...]]:
        """Hand over the tensors to send to another rank's stage, and whether each will get a gradient."""
        if kind is Kind.F:
            return self._take_outputs(), self.returned.requires_grad
        grads = tuple(g for g in self._take_input_grads() if g is not None)
        return grads, (False,) * len(grads)

    def _take_outputs(self) -> Tensors:
        assert self.outputs is not None
        taken, self.activations = self.outputs, None
        return taken

    def _take_input_grads(self) -> OptionalTensors:
        taken, self.gradients = self.input_grads, ()
        return taken

    def take_activations(self) -> Tensors:
        """Hand over the inputs of the next block."""
        before = self.transfers.beside.pop(Kind.F, None) if self.activations is None else None
        if before is not None:
            passed = zip(before._take_outputs(), before.returned.requires_grad, strict=True)
            self.activations = tuple(t.requires_grad_(r) for t, r in passed)
        taken, self.activations = self.activations, None
        assert taken is not None, f"microbatch {self.index} has no input"
        return taken

    def take_gradients(self) -> OptionalTensors:
        """Hand over the gradients of the outputs of the block whose backward is next."""
        after = self.transfers.beside.pop(Kind.I, None) if self.gradients is None else None
        if after is not None:
            self.gradients = after._take_input_grads()
        taken, self.gradients = self.gradients, None
        assert taken is not None, f"microbatch {self.index} has no gradient of its output"
        return taken

    def offload_of(self, block: int) -> BlockOffload | None:
        """Return what the run of a block has left that may leave to host memory."""
        run = self.runs.get(block)
        return None if run is None else run.offload

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

    def finish(self) -> None:
        """Release activations, graphs and gradients at the microbatch's last compute node; results and sends stay.

        With thousands of microbatches in a step, Python's garbage collector would else traverse all of it.
        """
        before, self.phase = self.objective, Phase.FINISHED
        self.objective = Objective(loss_grad=before.loss_grad, return_outputs=before.return_outputs)
        self.runs = {}
        del self.queues, self.transfers, self.random, self.tied, self.memo


def absent(like: Tensor | None = None) -> Tensor:
    """Return the stand-in for an input that is not given this step, on the device of another input."""
    return torch.empty(0, dtype=torch.bool, device=None if like is None else like.device)


def is_absent(tensor: Tensor) -> bool:
    """Return whether a tensor is the stand-in of :func:`absent`."""
    return tensor.dtype is torch.bool and tensor.shape == (0,)


def tensors(value: Tensor | Sequence[Tensor] | None) -> Tensors:
    """Return one tensor, several, or none as a tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, Tensor) else tuple(value)


def unwrapped(values: tuple[Tensor | None, ...] | None) -> Tensor | tuple[Tensor | None, ...] | None:
    """Return a single value by itself, several as a tuple."""
    return values[0] if values is not None and len(values) == 1 else values
