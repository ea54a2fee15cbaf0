"""Parts of blocks as device graphs: what a block computes before its experts and behind them, at one launch each.

All but the experts has fixed shapes, with exact sizes, too: norms, attention, router, shared experts. A block's own
forward is run once without computing, and what it queues on the device is captured, in a part before its call of
experts and one behind it; so is the backward of each. Later forwards and backwards replay the graphs. Experts,
exchanges and weight gradients of linear layers stay nodes of the plan.

A graph has memory of its own. So every microbatch that is open has a *slot*, from its first forward to its last weight
gradient, and each slot has graphs of its own. The four of a block and slot share a pool: memory in which one computes
serves those behind it, too. It does not serve other blocks, whose graphs are replayed in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from overlap1f1b.cut.blocks import MicrobatchBlock, is_compiled
from overlap1f1b.cut.crossing import CrossingMode, Replaces
from overlap1f1b.cut.edges import edge_of, gradients, next_sequence_number, nodes_behind
from overlap1f1b.cut.places import places_of
from overlap1f1b.cut.replacement import ABSENT, Replacement, replaced
from overlap1f1b.cut.weights import WeightQueue, main_grad
from overlap1f1b.moe.experts import Experts
from overlap1f1b.schedule.values import some
from overlap1f1b.transport.devices import GraphCapture

_HOOKS = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"


class UnfitError(RuntimeError):
    """A block that cannot be captured, and why."""


class Queued(Protocol):
    """A stage: where forwards that run now leave their weight gradients, and the leaf to which such layers lead."""

    queue: WeightQueue
    anchor: Tensor


class Place(NamedTuple):
    """A tensor of the first part that the last one uses: of what it was given, or of its hidden outputs."""

    given: bool
    number: int


@dataclass(eq=False)
class Part:
    """A part of a block, before its experts or behind them, captured for one slot."""

    start: int  # sequence number below those of its autograd nodes
    given: list[Tensor]
    """Memory from which it reads what it is called with: the block's inputs, or the experts' result."""
    outputs: list[Tensor] = field(default_factory=list)
    """Memory of what it hands on."""
    hidden: list[Tensor] = field(default_factory=list)
    """Memory of what the last part uses besides."""
    places: list[Place] = field(default_factory=list)
    """Where the first part has what it uses of it."""
    entered: list[Tensor] = field(default_factory=list)
    """The same as tensors without a history."""
    parameters: list[nn.Parameter] = field(default_factory=list)
    """Those whose gradients its backward computes."""
    roots: list[Tensor] = field(default_factory=list)
    """Memory of the gradients of hidden and other outputs, in this order."""
    found: list[Tensor | None] = field(default_factory=list)
    """Memory of the gradients of what it uses: given, entered, parameters; None for one without."""
    deferred: list[tuple[nn.Parameter, Callable[[], Tensor | None]]] = field(default_factory=list)
    """Weight gradients that its backward leaves to a queue."""
    leaves: bool = False
    """Whether the gradients of what it is given leave the stage: a send may still read them when the slot has another
    microbatch."""
    forward: Callable[[], object] = lambda: None
    backward: Callable[[], object] = lambda: None

    @property
    def results(self) -> list[Tensor]:
        """Hidden and other outputs."""
        return [*self.hidden, *self.outputs]


class _Replay(torch.autograd.Function):
    """A part of a block: copies what it uses to where its graph reads it, and replays."""

    @staticmethod
    def forward(ctx: Any, part: Part, stage: Queued, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.part, ctx.stage = part, stage
        _copy(tensors, part.given)  # what entered from the first part is there already
        part.forward()
        results = [memory.detach() for memory in part.results]
        ctx.mark_non_differentiable(*[r for r, m in zip(results, part.results, strict=True) if not m.requires_grad])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        part: Part = ctx.part
        _copy([grad for grad, memory in zip(grads, part.results, strict=True) if memory.requires_grad], part.roots)
        part.backward()
        for weight, gradient in part.deferred:
            ctx.stage.queue.put(weight, gradient)
        copied = len(part.given) if part.leaves else 0
        found = [grad.clone() if at < copied and grad is not None else grad for at, grad in enumerate(part.found)]
        return None, None, *found


def _copy(tensors: Sequence[Tensor], memory: Sequence[Tensor]) -> None:
    for place, tensor in zip(memory, tensors, strict=False):
        place.detach().copy_(tensor)


class _Made(TorchDispatchMode):
    """Notes the memory of all tensors that are made; refuses what makes the host wait for a device.

    A capture in which the host has waited is lost, and torch does not clear it away.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _waits(func, args, kwargs):
            raise UnfitError(f"the host waits for the device in {func}")
        result = func(*args, **kwargs)
        for out in result if isinstance(result, tuple | list) else (result,):
            if isinstance(out, Tensor):
                self._made.append(StorageWeakRef(out.untyped_storage()))
        return result

    def alive(self) -> list[Any]:
        """Return the memory of those that are still there."""
        found = (torch.UntypedStorage._new_with_weak_ptr(made.cdata) for made in self._made)
        return [storage for storage in found if storage is not None]


def _waits(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether the host waits for the device: to see a value, a size, or what is copied from one to the other."""
    aten = torch.ops.aten
    if operation in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
        return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])  # it counts those chosen
    if operation is aten.copy_.default:
        return args[0].device.type != args[1].device.type
    if operation is aten._to_copy.default:
        there = kwargs.get("device")
        return there is not None and torch.device(there).type != args[0].device.type
    if operation is aten.repeat_interleave.Tensor and kwargs.get("output_size") is not None:
        return False
    return torch.Tag.data_dependent_output in operation.tags or torch.Tag.dynamic_output_shape in operation.tags


class CapturedBlock(Replaces):
    """A block for one slot; called with the block's inputs, it returns what the block's forward returns.

    Its forward and backward are captured without computing. A function mode shows what the last part uses of the first:
    it enters without its history. Leaves have stand-ins, with the same memory: the autograd node of a leaf belongs to
    the stream on which it was made, and one of a step is not allowed in a capture, nor one of a capture in a step.
    """

    bytes: int
    """Memory of its graphs."""

    def __init__(self, module: nn.Module, capture: GraphCapture) -> None:
        self._module, self._capture = module, capture
        self._parameters: dict[nn.Parameter, nn.Parameter] = {}  # by their stand-ins
        self.parts: list[Part] = []
        self._experts: Experts | None = None  # called between the parts
        self._several = False  # whether the forward returns a tuple
        self._made = _Made()
        self._entered: dict[Place, Tensor] = {}  # into the last part
        self._kept: list[Any] = []
        """Memory that parts have in common, or that must last from a forward to its backward: no other graph may take
        it."""

    def __call__(self, stage: Queued, *x: Tensor) -> Any:
        """Run the block forward."""
        first, last = self.parts
        results = _Replay.apply(first, stage, *x, *first.parameters)
        hidden = results[: len(first.hidden)]
        assert self._experts is not None
        y = self._experts(*results[len(first.hidden) :])
        entering = [(x if place.given else hidden)[place.number] for place in last.places]
        outputs = _Replay.apply(last, stage, y, *entering, *last.parameters)
        return outputs if self._several else outputs[0]

    def capture(self, stage: Queued, x: Sequence[Tensor]) -> None:
        """Capture graphs for inputs like these; raise an UnfitError if that is not possible."""
        given = [t.detach().clone().requires_grad_(t.requires_grad) for t in x]
        experts = [module for module in self._module.modules() if isinstance(module, Experts)]
        borders = [(vars(one), "forward", partial(self._border, one)) for one in experts]
        outside = stage.queue, stage.anchor
        stage.queue, stage.anchor = WeightQueue(), stage.anchor.detach().requires_grad_()
        try:
            with replaced([*borders, *self._stand_ins()]), self._capture.around(), self._made, torch.enable_grad():
                before = _state(self._module)
                self._begin(given)
                with CrossingMode(self):
                    returned = self._module(*given)
                self._end(returned if isinstance(returned, tuple) else (returned,))
                if self._experts is None:
                    raise UnfitError("it does not call its experts")
                after = _state(self._module)
                for key in before.keys() | after:
                    if before.get(key, ABSENT) is not after.get(key, ABSENT):
                        raise UnfitError(f"its forward sets {key[1]}")
                for part in reversed(self.parts):
                    self._backward(part, stage)
        finally:
            stage.queue, stage.anchor = outside
            self._capture.leave()
        self._several, self.bytes = isinstance(returned, tuple), self._capture.bytes

    def _stand_ins(self) -> Iterator[Replacement]:
        known: dict[nn.Parameter, nn.Parameter] = {}
        for module in self._module.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.requires_grad:
                    if parameter not in known:
                        known[parameter] = nn.Parameter(parameter.detach())
                        vars(known[parameter]).update(vars(parameter))
                    yield module._parameters, name, known[parameter]
        self._parameters = {stand_in: parameter for parameter, stand_in in known.items()}

    def _begin(self, given: list[Tensor]) -> None:
        self._capture.begin()
        self.parts.append(Part(next_sequence_number(), given))

    def _end(self, outputs: Sequence[Any]) -> None:
        if not outputs or not all(isinstance(out, Tensor) for out in outputs):
            raise UnfitError("experts are called with, or the block returns, something else than tensors")
        part = self.parts[-1]
        part.outputs = [self.entered(out) for out in outputs]
        part.forward = self._capture.end()
        part.places, part.entered = list(self._entered), list(self._entered.values())
        self._kept += self._made.alive()

    def _border(self, experts: Experts, *tensors: Any, **named: Any) -> Tensor:
        """End the first part where the block calls experts, and begin the last with their result."""
        if named:
            raise UnfitError("experts are called with arguments by name")
        if self._experts is not None:  # gradients of what three parts use would be summed in another order
            raise UnfitError("it calls experts more than once")
        self._end(tensors)
        self._experts = experts
        result = torch.empty_like(tensors[0]).detach().requires_grad_()
        self._begin([result])
        return result

    def entered(self, tensor: Tensor) -> Tensor:
        place = self._place(tensor)
        if place is None:
            return tensor
        if place not in self._entered:
            self._entered[place] = tensor.detach().requires_grad_()
        return self._entered[place]

    def _place(self, tensor: Tensor) -> Place | None:
        """Return where the first part has a tensor; None if the running part has made it, or it has no gradient."""
        node, first, running = tensor.grad_fn, self.parts[0], self.parts[-1]
        if node is None:
            given = (i for i, t in enumerate(first.given) if t is tensor and t.requires_grad)
            number = next(given, -1)
            return None if number < 0 or running is first else Place(True, number)
        if node._sequence_nr() >= running.start:
            return None
        if node._sequence_nr() < first.start:
            raise UnfitError("it uses a tensor that was made before it, with its graph")
        known = (n for n, t in enumerate(first.hidden) if t.grad_fn is node and t.output_nr == tensor.output_nr)
        number = next(known, len(first.hidden))
        if number == len(first.hidden):
            first.hidden.append(tensor)
        return Place(False, number)

    def _backward(self, part: Part, stage: Queued) -> None:
        results = [memory for memory in part.results if memory.requires_grad]
        edges = [edge_of(result) for result in results]
        if not edges:
            return
        known = {id(t) for t in (stage.anchor, *part.given, *part.entered)}
        weights = []
        for leaf in (node.variable for node in nodes_behind(edge.node for edge in edges) if hasattr(node, "variable")):
            if leaf in self._parameters:
                weights.append(leaf)
            elif id(leaf) not in known:
                raise UnfitError("it uses a tensor with a graph of its own, beside its inputs and parameters")
        part.parameters = [self._parameters[weight] for weight in weights]
        used = *part.given, *part.entered, *weights
        part.roots = [torch.empty_like(result).detach() for result in results]
        self._capture.begin()
        with torch.autocast(part.roots[0].device.type, enabled=False):  # as around the backwards of a step
            found = iter(gradients(edges, part.roots, [t for t in used if t.requires_grad]))
        part.backward = self._capture.end()
        self._kept += self._made.alive()
        part.found = [next(found) if t.requires_grad else None for t in used]
        part.deferred = [(self._parameters[weight], gradient) for weight, gradient in stage.queue.take()]


def _state(module: nn.Module) -> dict[tuple[int, str], Any]:
    """Return what a module's forward may set, by the number of its owner and its name."""
    return {
        (number, f"{place.before}{name}{place.after}"): value
        for number, place in places_of(module).items()
        for name, value in place.all.items()
    }


class Graphs:
    """The graphs of a stage's blocks, made when a microbatch needs them."""

    def __init__(self, stage: Queued, blocks: Sequence[nn.Module], device: torch.device) -> None:
        self.active = False
        """Whether the step that runs replays graphs."""
        self.unfit: dict[int, str] = {}
        """Why a block has none, by its number."""
        self._stage, self._blocks, self._device = stage, blocks, device
        self._capture = GraphCapture(device)
        # By block and slot, with what they are for.
        self._captured: dict[tuple[int, int], tuple[object, CapturedBlock]] = {}
        self._facts: dict[int, object] = {}
        self._slots: dict[int, int] = {}  # of microbatches
        self._told = set[int]()

    def begin(self) -> None:
        """Forget the slots of an earlier step, and the graphs of blocks that have changed since."""
        self._slots.clear()
        if not self.active:
            return
        for number, block in enumerate(self._blocks):
            facts = _facts(block)
            if self._facts.get(number) != facts:
                self._captured = {key: value for key, value in self._captured.items() if key[0] != number}
                self._facts[number] = facts

    def end(self, microbatch: int) -> None:
        """Let another microbatch have the slot of one that has ended."""
        self._slots.pop(microbatch, None)

    def of(self, number: int, microbatch: int, x: Sequence[Tensor]) -> Callable[..., Any] | None:
        """Return a block's forward by graphs; None if it has none, or cannot have one."""
        if number in self.unfit:
            return None
        slot = self._slots.get(microbatch)
        if slot is None:
            taken = set(self._slots.values())
            slot = self._slots[microbatch] = next(i for i in range(len(taken) + 1) if i not in taken)
        kind = self._device.type
        form = (
            torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
            [(t.shape, t.stride(), t.dtype, t.requires_grad) for t in x],
        )
        known = self._captured.get((number, slot))
        if known is None or known[0] != form:
            try:
                _check_fit(self._blocks[number])
                captured = CapturedBlock(self._blocks[number], self._capture)
                captured.capture(self._stage, x)
            except Exception as error:  # of any kind: a block may do in its forward what it likes
                self.unfit[number] = str(error).partition("\n")[0]
                return None
            captured.parts[0].leaves = number == 0
            known = self._captured[number, slot] = form, captured
        return partial(known[1], self._stage)

    def unfit_now(self, names: Sequence[str]) -> list[tuple[str, str]]:
        """Return the reasons that were found since the last call, each with the names of its blocks."""
        reasons: dict[str, list[str]] = {}
        for number in self.unfit.keys() - self._told:
            reasons.setdefault(self.unfit[number], []).append(names[number])
        self._told |= self.unfit.keys()
        return [(reason, some(blocks, 4)) for reason, blocks in reasons.items()]

    @property
    def bytes(self) -> int:
        """Memory that graphs hold between steps."""
        return sum(captured.bytes for _, captured in self._captured.values())


def _check_fit(block: nn.Module) -> None:
    """Raise an UnfitError if it can be seen before that a block cannot be captured."""
    if isinstance(block, MicrobatchBlock):
        raise UnfitError("it is told its microbatch")
    if is_compiled(block):
        raise UnfitError("it is under torch.compile")
    for name, module in block.named_modules():
        if any(getattr(module, kind) for kind in _HOOKS) and not isinstance(module, Experts):
            raise UnfitError(f"{name or 'it'} has hooks")
    for name, parameter in block.named_parameters():
        if isinstance(parameter, DTensor) or main_grad(parameter) is not None:
            raise UnfitError(f"{name} is a DTensor, or has a main_grad")


def _facts(block: nn.Module) -> object:
    """Return what a graph of a block depends on: torch's settings, where its tensors are, what modules are set to."""
    tensors = [(t.data_ptr(), t.requires_grad) for t in (*block.parameters(), *block.buffers())]
    settings = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    return settings, tensors, [(module.training, getattr(module, "aux_scale", None)) for module in block.modules()]
