"""One microbatch on one stage: its state from the forward to the last weight gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from overlap1f1b.cut.random import RandomStream
from overlap1f1b.cut.stage import Stage
from overlap1f1b.cut.weights import Gradients, WeightQueue, accumulate
from overlap1f1b.plan import Node, Op, Place, awaited_by
from overlap1f1b.play.install import Installation
from overlap1f1b.schedule import Kind
from overlap1f1b.transport.exchange import Transfer
from overlap1f1b.transport.lanes import Flight

LossFunction = Callable[..., Tensor]
"""``(*outputs of the last block, *targets) → scalar``."""

Tensors = tuple[Tensor, ...]
OptionalTensors = tuple[Tensor | None, ...]


def check_call(
    error: TypeError, function: Callable[..., Any], name: str, allowed: str, *values: Any, **given: Any
) -> None:
    """Raise ``ValueError`` if ``error`` comes from a user's function that does not take what it is given."""
    try:
        takes = signature(function)
    except ValueError:  # it has none
        return
    try:
        takes.bind(*values, **given)
    except TypeError as reason:
        raise ValueError(f"{name} is given {len(values)} tensor(s): {reason}; allowed: {allowed}") from error


class Microbatch:
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
        self.installed = Installation(stage) if installed is None else installed
        self.stage, self.index, self.loss_fn, self.grad = stage, index, loss_fn, grad
        self.target, self.loss_grad, self.return_outputs = tensors(target), loss_grad, return_outputs
        self.forwarded = self.ended = self.finished = False
        self.activations: Tensors | None = None if inputs is None else tensors(inputs)
        """Inputs of the next block: leaves, which require a gradient where one will come."""
        self.outputs: Tensors | None = None
        """Outputs of the last block, or the loss if there is a ``loss_fn``, until they are sent on."""
        self.requires_grad: tuple[bool, ...] = ()
        """Whether each output will get a gradient."""
        self.kept: Tensors = ()
        """Arguments of ``loss_fn``, if ``return_outputs``."""
        self.output_grads: OptionalTensors | None = None
        self.input_grads: OptionalTensors = ()
        self.before: Microbatch | None = None  # the same on the stage before and after, where this rank holds them
        self.after: Microbatch | None = None
        self.runs: dict[int, Any] = {}
        """The :class:`~overlap1f1b.play.block.BlockRun` of each block between its first node and its last."""
        self.queues: dict[tuple[Op, int, int], WeightQueue] = {}
        """Weight gradients that a backward has left, by (op, block, call of experts)."""
        self.flights: dict[Kind, dict[Place, Flight[Any]]] = {Kind.F: {}, Kind.I: {}}  # exchanges in flight, each way
        self.receiving: dict[Kind, Flight[Tensors]] = {}  # what another rank's stage sends, each way
        self.expected: dict[Node, Transfer[Tensor] | None] = {}  # announced receives
        self.random = RandomStream(seed, stage.generators)
        self.tied: Gradients = {}
        """Gradients of parameters that blocks share, summed until the first of these blocks adds them."""
        self.memo: dict[object, Any] = {}
        """Values that blocks share, see :class:`~overlap1f1b.cut.blocks.MicrobatchBlock`."""

    def install(self, installed: Installation) -> None:
        """Go on in another step."""
        self.installed = installed
        for run in self.runs.values():
            run.installed = installed

    @property
    def output(self) -> Tensor | OptionalTensors | None:
        """The loss or the last block's outputs, detached; None before the forward has ended."""
        return unwrapped(self.outputs)

    @property
    def input_grad(self) -> Tensor | OptionalTensors | None:
        """Gradient of the input, or of each input; None for one that requires none."""
        return unwrapped(self.input_grads) if self.input_grads else None

    def coming(self, node: Node) -> dict[Place, Flight[Any]]:
        """Return, and take out, the exchanges that a compute node waits for: that of its part, or all."""
        flying = self.flights[node.kind]
        if node.op is Op.EXPERTS and (one := awaited_by(node)) in flying:
            return {one: flying.pop(one)}
        self.flights[node.kind] = {}
        return flying

    def await_input(self, kind: Kind, coming: Mapping[Place, Flight[Any]]) -> dict[Place, Any]:
        """Wait for the tensors that the next compute node needs from other ranks; return what its exchanges bring."""
        if kind in self.receiving:
            arrived = self.receiving.pop(kind).wait()
            if kind is Kind.F:
                self.activations = arrived
            else:
                grads = iter(arrived)
                self.output_grads = tuple(next(grads) if required else None for required in self.requires_grad)
        return {place: flight.wait() for place, flight in coming.items()}

    def with_loss(self, outs: Tensors, name: str) -> Tensors:
        """Return the outputs of the last block, ``name``, or the loss if there is a ``loss_fn``."""
        if self.loss_fn is None:
            return outs
        if self.return_outputs:
            self.kept = tuple(t.detach() for t in outs)
        given = *outs, *self.target
        try:
            loss = self.loss_fn(*given)
        except TypeError as error:
            allowed = "one argument for each output of the last block and each target"
            check_call(error, getattr(self.loss_fn, "forward", self.loss_fn), "loss_fn", allowed, *given)
            raise
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a value of {type(loss).__name__}"
            raise ValueError(f"loss_fn returns {found}; allowed: one number")
        if loss.is_complex():
            raise ValueError(f"loss_fn returns a number of {loss.dtype}; allowed: a real one")
        if self.grad and not loss.requires_grad:
            raise ValueError(f"the loss of {name}'s outputs requires no gradient; allowed: a loss that depends on them")
        if self.grad and not self.forwarded:  # a recomputed forward must not replace a gradient that was given since
            # Filled on its device: a copy to a GPU would wait for the device.
            self.output_grads = (torch.full_like(loss, self.loss_grad),)
        return (loss,)

    def take_passed(self, kind: Kind) -> tuple[Tensors, tuple[bool, ...]]:
        """Hand over the tensors to send to another rank's stage, and whether each will get a gradient."""
        if kind is Kind.F:
            passed, self.outputs = self.outputs, None
            assert passed is not None
            return passed, self.requires_grad
        grads, self.input_grads = tuple(g for g in self.input_grads if g is not None), ()
        return grads, (False,) * len(grads)

    def take_activations(self) -> Tensors:
        """Hand over the inputs of the next block."""
        if self.activations is None and self.before is not None:
            before, self.before = self.before, None
            passed, before.outputs = before.outputs, None
            assert passed is not None
            self.activations = tuple(t.requires_grad_(r) for t, r in zip(passed, before.requires_grad, strict=True))
        taken, self.activations = self.activations, None
        assert taken is not None, f"microbatch {self.index} has no input"
        return taken

    def take_output_grads(self) -> OptionalTensors:
        """Hand over the gradients of the outputs of the block whose backward is next."""
        if self.output_grads is None and self.after is not None:
            after, self.after = self.after, None
            self.output_grads, after.input_grads = after.input_grads, ()
        taken, self.output_grads = self.output_grads, None
        assert taken is not None, f"microbatch {self.index} has no gradient of its output"
        return taken

    def accumulate_weights(self) -> None:
        """Compute the weight gradients that the backward has left, and add them to ``.grad``."""
        if self.finished:
            return
        with torch.no_grad():
            for place in list(self.queues):
                accumulate(self.queues.pop(place).compute())

    def finish(self) -> None:
        """Release activations, graphs and gradients at the microbatch's last compute node; results and sends stay.

        With thousands of microbatches in a step, Python's garbage collector would else traverse all of it.
        """
        self.finished, self.target, self.loss_fn = True, (), None
        del self.runs, self.queues, self.flights, self.receiving, self.expected, self.random, self.tied, self.memo

    def stop(self) -> None:
        """Unwind suspended forwards and release everything."""
        if self.finished:
            return
        for run in self.runs.values():
            with suppress(Exception):  # of a block that makes an error of its own from the end of its forward
                run.stop()
        for state in (self.runs, self.queues, self.flights, self.receiving, self.expected, self.memo):
            state.clear()
        self.before = self.after = None


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
