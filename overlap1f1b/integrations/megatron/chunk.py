"""A model chunk as blocks of a stage: the user's forward step is suspended before each layer and after the last.

1. :func:`parts_of` returns the parts into which a chunk is cut, with their modules.
2. :class:`Chunk` runs the user's ``forward_step_func`` from one cut to the next; a :class:`Segment` is one such part.
3. :class:`CutCheck` follows the first forward's graph: gradients must pass a cut only through the layer's tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from greenlet import getcurrent
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from overlap1f1b.engine.run.microbatch import Tensors
from overlap1f1b.integrations.graph import graph_nodes
from overlap1f1b.integrations.megatron.config import attribute_of
from overlap1f1b.integrations.megatron.step import ChunkStep
from overlap1f1b.moe import Experts
from overlap1f1b.transport.calls import ExchangeCall
from overlap1f1b.transport.suspend import Forward, ThreadState

Layers = Callable[[nn.Module], Sequence[nn.Module]]
"""Function that returns the layers of a chunk, in the order in which its forward calls them."""


def default_layers(chunk: nn.Module) -> Sequence[nn.Module]:
    """Return the children of an ``nn.Sequential``, else ``chunk.layers``, else ``chunk.decoder.layers``, else none.

    Wrappers are unwrapped by ``.module``. The result is also empty if the chunk's config runs layers inside a
    checkpoint, which cannot be cut: ``recompute_granularity="full"``, or any granularity with layers of MTP, which use
    the embedding and the output layer of the other layers.
    """
    while isinstance(inner := getattr(chunk, "module", None), nn.Module):
        chunk = inner
    config = attribute_of(chunk, "config")
    recomputes = getattr(config, "recompute_granularity", None)
    if recomputes == "full" or (recomputes is not None and getattr(config, "mtp_num_layers", None)):
        return []
    if type(chunk).forward is nn.Sequential.forward:
        return list(chunk.children())
    for owner in (chunk, getattr(chunk, "decoder", None)):
        layers = getattr(owner, "layers", None)
        if isinstance(layers, nn.ModuleList | nn.Sequential):
            return list(layers)
    return []


class Part(NamedTuple):
    """A part of a chunk's forward.

    Args:
        name: Name for messages.
        held: A module that holds the modules of the part.
        cut: The layer at which the part begins; None if it begins with the forward.
        behind: Whether the part begins after that layer instead of before it.
    """

    name: str
    held: nn.Module
    cut: nn.Module | None = None
    behind: bool = False


def parts_of(chunk: nn.Module, layers: Sequence[nn.Module], *, ends: bool) -> list[Part]:
    """Return the parts of a chunk that is cut at its layers; without layers it is one part.

    Each layer is a part. The modules before the first layer are a part if they have parameters. The modules after the
    last layer are a part if they have parameters or if the model ends there; so the backward walks a head and a loss
    once, not once for each call of experts before them.

    Modules that are registered after the layers are assumed to run after them. Modules that are registered before the
    layers may run on either side, so both parts hold them: their parameters are complete with the first part's
    backward.

    Args:
        chunk: The chunk, which may be wrapped.
        layers: Its layers in order.
        ends: Whether the chunk computes the loss.

    Raises:
        ValueError: A layer is not in the chunk or is in it twice, or there are experts before the layers.
    """
    if not layers:
        return [Part("it", chunk)]
    every = set(chunk.modules())
    for layer in layers:
        if layer not in every or list(layers).count(layer) > 1:
            where = "twice" if layer in every else "not at all"
            raise ValueError(f"a layer of type {type(layer).__name__} is {where} in the chunk; allowed: once each")
    before: list[nn.Module] = []
    behind: list[nn.Module] = []
    direct: list[nn.Parameter] = []
    reached = False

    def visit(module: nn.Module) -> None:
        nonlocal reached
        if module in layers:
            reached = True
        elif not any(inner in layers for inner in module.modules()):
            behind.append(module)
            if not reached:
                before.append(module)
        else:
            direct.extend(module.parameters(recurse=False))
            for child in module.children():
                visit(child)

    visit(chunk)
    if any(isinstance(inner, Experts) for module in before for inner in module.modules()):
        raise ValueError("Experts before the layers of a chunk; allowed: in a layer, or layers=lambda chunk: []")
    parts = [Part(f"layer {number}", layer, layer) for number, layer in enumerate(layers)]
    head, tail = (nn.ModuleList([*modules, nn.ParameterList(direct)]) for modules in (before, behind))
    if any(True for _ in head.parameters()):
        parts.insert(0, Part("the part before layer 0", head))
    else:
        parts[0] = parts[0]._replace(cut=None)
    if ends or any(True for _ in tail.parameters()):
        parts.append(Part(f"the part after layer {len(layers) - 1}", tail, layers[-1], behind=True))
    return parts


class CutCheck:
    """Check of one forward's graph, part by part: it may pass a cut only through the layer's tensors.

    The backward of a part starts from the tensors at its end, so a gradient on another path would be lost.

    Args:
        name: Name of the chunk, for messages.
        parts: Its parts.
    """

    def __init__(self, name: str, parts: Sequence[Part]) -> None:
        self.name, self.parts = name, parts
        self._earlier: dict[int, Any] = {}  # leaves and nodes of earlier parts, by id; the values keep the ids valid
        self._here: list[Any] = []

    def add_leaves(self, leaves: Iterable[Tensor]) -> None:
        """Add leaves of the current part."""
        self._here += leaves

    def end_part(self, leaves: Iterable[Tensor]) -> None:
        """End the current part, which began with these leaves."""
        self._earlier |= {id(part): part for part in (*self._here, *leaves)}
        self._here = []

    def check(self, outputs: Iterable[Any], number: int) -> None:
        """Check the graph of tensors that part ``number`` has computed.

        Raises:
            ValueError: The graph reaches an earlier part, or a parameter of another part.
        """
        part = self.parts[number]
        own = {id(p) for p in part.held.parameters()}
        others = {id(p): name for other in self.parts for name, p in other.held.named_parameters() if id(p) not in own}
        nodes = graph_nodes(output for output in outputs if isinstance(output, Tensor))
        for node in nodes:
            leaf = getattr(node, "variable", node)  # all parts share the node that only adds to a leaf
            if id(leaf) in self._earlier or id(leaf) in others:
                what = f"parameter {others[id(leaf)]}" if id(leaf) in others else "a tensor of an earlier layer"
                way = "result" if part.behind else "arguments"
                raise ValueError(
                    f"{self.name}: {what} gets a gradient from {part.name} by another way than the layer's "
                    f"{way}; allowed: no such tensor, or layers=lambda chunk: [] for a chunk that is not cut"
                )
        self._here += [node for node in nodes if not hasattr(node, "variable")]


@dataclass
class _SuspendedForward:
    """The forward of a microbatch, from its first part to its last."""

    forward: Forward
    check: CutCheck | None
    part: int = 0


class Chunk:
    """The forwards of one model chunk.

    Args:
        model: A module with ``set_input_tensor``, which may be wrapped.
        layers: Modules at which the forward is cut, see :func:`parts_of`.
        stage: Number of the stage in the pipeline.
        last: Whether this chunk computes the loss.
        passes_last_input: Whether to append the chunk's last input (in a decoder: the encoder's output) to its output.

    Raises:
        ValueError: The model has no ``set_input_tensor``, or the layers are not in it.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[nn.Module], *, stage: int, last: bool, passes_last_input: bool = False
    ) -> None:
        self.set_input_tensor = attribute_of(model, "set_input_tensor")
        if self.set_input_tensor is None:
            raise ValueError(
                f"a model chunk of type {type(model).__name__} without set_input_tensor; allowed: one with this method"
            )
        self.model, self.stage, self.last, self.passes_last_input = model, stage, last, passes_last_input
        parameter = next(model.parameters(), None)
        self.device = torch.device("cpu") if parameter is None else parameter.device
        self.name = f"chunk of stage {stage} ({type(model).__name__})"
        self.parts = parts_of(model, layers, ends=last)
        self.segments = [Segment(self, index, part.held) for index, part in enumerate(self.parts)]
        self.step: ChunkStep | None = None
        self.running = 0
        """The microbatch of the current node."""
        self._suspended: dict[int, _SuspendedForward] = {}
        self._checked = len(self.segments) == 1

    @contextmanager
    def stepping(self, step: ChunkStep) -> Iterator[None]:
        """Use a step's arguments inside the context, and suspend forwards at the chunk's layers."""
        self.step = step
        hooks = [
            self._hook(index, part.cut, part.behind) for index, part in enumerate(self.parts) if part.cut is not None
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            state = ThreadState.capture(self.device)
            for suspended in self._suspended.values():  # after a failure
                suspended.forward.stop()
            state.restore(ThreadState.capture(self.device), self.name)
            self._suspended, self.step = {}, None

    def run(self, part: int, inputs: Tensors) -> Tensors | Tensor:
        """Run one part of the current microbatch's forward; return the tensors at its end."""
        microbatch = self.running
        if len(self.segments) == 1:
            return self._forward_step(microbatch, inputs)
        # 1. Start the forward, or resume it.
        if part == 0:
            forward = Forward(self._forward_step, self.name, self.device)
            check = None if self._checked else CutCheck(self.name, self.parts)
            suspended = self._suspended[microbatch] = _SuspendedForward(forward, check)
            handed = forward.start(microbatch, inputs)
        else:
            suspended = self._suspended[microbatch]
            suspended.part, forward, check = part, suspended.forward, suspended.check
            handed = forward.resume(inputs)
        # 2. Pass each call of experts on to the block's forward, which is suspended for it.
        while isinstance(handed, ExchangeCall):
            if check is not None:
                check.check((handed.tokens, handed.weights), part)
            outer = getcurrent().parent
            if outer is None:  # the block has no experts of its own
                raise ValueError(f"{self.name} calls experts outside of the layer that holds them; allowed: inside")
            result = outer.switch(handed)  # the inner forward has restored the outer one's thread state
            if check is not None:
                check.add_leaves((result,))
            handed = forward.resume(result)
        # 3. The part has ended.
        if forward.dead and part < len(self.parts) - 1:
            raise ValueError(
                f"{self.name} ends after {self.parts[part].name}, without {self.parts[part + 1].name}; "
                "allowed: to call each layer once, or layers=lambda chunk: [] for a chunk that is not cut"
            )
        if check is not None:
            check.check((handed,) if isinstance(handed, Tensor) else handed, part)
            check.end_part(inputs)
        if forward.dead:
            del self._suspended[microbatch]
            self._checked |= torch.is_grad_enabled()
        return handed

    def _hook(self, index: int, layer: nn.Module, behind: bool) -> RemovableHandle:
        """Suspend forwards at the start of the part with this index: before or after its layer."""
        kind = type(layer).__name__

        def before_it(_: nn.Module, args: Any, kwargs: Any) -> Any:
            return self._suspend(index, (args, kwargs), f"calls its layer of type {kind} without a tensor")

        def behind_it(_: nn.Module, args: Any, output: Any) -> Any:
            return self._suspend(index, output, f"has a last layer of type {kind} that returns no tensor")

        if behind:
            return layer.register_forward_hook(behind_it)
        return layer.register_forward_pre_hook(before_it, with_kwargs=True)

    def _suspend(self, index: int, passed: Any, without: str) -> Any:
        """Leave the forward before the part of this index; return ``passed`` with new leaves for its tensors."""
        suspended = self._suspended.get(self.running)
        if suspended is None or getcurrent() is not suspended.forward:  # the layer runs alone, or in a recomputation
            return None
        if index != suspended.part + 1:
            raise ValueError(
                f"{self.name} comes to {self.parts[index].name} after {self.parts[suspended.part].name}; "
                "allowed: each layer once, in order, or layers=lambda chunk: [] for a chunk that is not cut"
            )
        values, spec = tree_flatten(passed)
        at = [position for position, value in enumerate(values) if isinstance(value, Tensor)]
        if not at:
            raise ValueError(f"{self.name} {without}; allowed: one or more, or layers=lambda chunk: []")
        given = tuple(_computed(values[position]) for position in at)
        leaves = suspended.forward.suspend(given, ThreadState.capture(self.device))
        for position, leaf in zip(at, leaves, strict=True):
            values[position] = leaf
        return tree_unflatten(values, spec)

    def _forward_step(self, microbatch: int, inputs: Tensors) -> Any:
        """Call the user's forward step for a microbatch; return the chunk's output tensors or its loss."""
        step = self.step
        assert step is not None
        assert step.begun == microbatch, "a plan begins the microbatches of a stage in their order"
        step.begun += 1
        mark = attribute_of(self.model, "set_is_first_microbatch")
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
                return step.losses.loss_of(microbatch, output, loss_func)
        outputs = tuple(output) if isinstance(output, list | tuple) else (output,)
        if self.passes_last_input:
            outputs += (inputs[-1],)
        return tuple(_computed(out) if isinstance(out, Tensor) else out for out in outputs)


class Segment(nn.Module):
    """One block of a stage: a part of a chunk's forward."""

    def __init__(self, chunk: Chunk, index: int, held: nn.Module) -> None:
        super().__init__()
        self.chunk, self.index, self.held = chunk, index, held

    def forward(self, *inputs: Tensor) -> Tensors | Tensor:
        return self.chunk.run(self.index, inputs)


def _computed(tensor: Tensor) -> Tensor:
    """Return a view of a leaf, else the tensor: the engine's own leaves must not come back as outputs."""
    return tensor.view_as(tensor) if tensor.requires_grad and tensor.is_leaf else tensor
