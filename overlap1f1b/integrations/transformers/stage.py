"""Stages of a causal LM: its own layers, called with what its own forward gives them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from overlap1f1b.engine import Microbatch, MicrobatchBlock
from overlap1f1b.engine.run.microbatch import OptionalTensors
from overlap1f1b.integrations.transformers.shell import Call, Shell

_ROUTED: ContextVar[list[Tensor] | None] = ContextVar("router logits of the running layer", default=None)


@dataclass(frozen=True, eq=False)
class Place:
    """What the blocks of a stage share.

    Args:
        shell: The model around its layers.
        number: Of the stage.
        start: Number of its first layer.
        end: Number after its last.
        first: Whether it holds the embedding.
        last: Whether it holds norm and head.
        inputs: Names of what the model is called with, in the order of the step's inputs.
    """

    shell: Shell
    number: int
    start: int
    end: int
    first: bool
    last: bool
    inputs: tuple[str, ...]

    def named(self, given: OptionalTensors) -> dict[str, Tensor]:
        """Those of the model's inputs that are given, by name."""
        if len(given) != len(self.inputs):
            raise ValueError(f"{len(given)} inputs; allowed: {len(self.inputs)}, {', '.join(self.inputs)}")
        if given[0] is None:
            raise ValueError(f"{self.inputs[0]} is None; allowed: a tensor, only other inputs may be left out")
        return {name: value for name, value in zip(self.inputs, given, strict=True) if value is not None}

    def calls(self, given: OptionalTensors, like: Tensor, microbatch: Microbatch | None) -> list[Call]:
        """What the layers are given for a microbatch, whose blocks share it."""
        kept = None if microbatch is None else microbatch.memo.get(self)
        if kept is None:
            kept = self.shell.calls(self.named(given), like, self.end - 1)
            self._keep(kept, microbatch)
        return kept

    def begin(self, given: OptionalTensors, microbatch: Microbatch | None) -> tuple[Tensor, list[Call]]:
        """The hidden states before the first layer, and the calls."""
        hidden, calls = self.shell.begin(self.named(given), self.end - 1)
        self._keep(calls, microbatch)
        return hidden, calls

    def _keep(self, calls: list[Call], microbatch: Microbatch | None) -> None:
        if microbatch is not None:
            microbatch.memo[self] = calls


class Layer(MicrobatchBlock):
    """A block of a stage: a decoder layer, with the embedding before the first and norm, head and loss after the last.

    Takes and returns ``(hidden [B, S, H], *inputs of the model or None, *router logits [T, E] of the layers so far)``;
    the first of all takes the model's inputs alone, the last returns its logits, behind its loss if there is a target.
    Between stages router logits are one tensor ``[layers, T, E]``.

    Args:
        place: Of the stage.
        number: Of the layer.
        layer: The model's own.
        gates: Modules in it whose outputs are router logits, with the place of the logits in them.
        beside: Modules of the model that this block calls before and after the layer.
    """

    def __init__(
        self,
        place: Place,
        number: int,
        layer: nn.Module,
        gates: Sequence[tuple[nn.Module, int]],
        beside: list[nn.Module],
    ) -> None:
        super().__init__()
        self.input_names = place.inputs
        self.place, self.number, self.layer, self.beside = place, number, layer, nn.ModuleList(beside)
        for gate, index in gates:
            gate.register_forward_hook(_recorder(index))
        self._checked = False

    def forward(self, *inputs: Any, microbatch: Microbatch | None = None) -> OptionalTensors:
        place, known = self.place, len(self.place.inputs)
        routed: tuple[Tensor, ...] = ()
        if place.first and self.number == place.start:
            given = inputs
            hidden, calls = place.begin(given, microbatch)
        else:
            hidden, given, routed = inputs[0], inputs[1 : known + 1], inputs[known + 1 :]
            if self.number == place.start and routed:
                routed = routed[0].unbind()
            calls = place.calls(given, hidden, microbatch)
        call = calls[self.number]
        if getattr(self.layer, "gradient_checkpointing", False) and self.layer.training:
            raise ValueError(f"layer {self.number} has gradient checkpointing of its own; allowed: disabled")
        with _recording() as here:
            hidden = self.layer(hidden, *call.args, **call.kwargs)
        if not isinstance(hidden, Tensor):
            raise ValueError(
                f"layer {self.number} ({type(self.layer).__name__}) returns {type(hidden).__name__}; allowed: a tensor"
            )
        routed = (*routed, *here)
        if self.number < place.end - 1:
            return self._checked_outputs(hidden, *given, *routed)
        if microbatch is not None:
            microbatch.memo.pop(place, None)
        if not place.last:
            return self._checked_outputs(hidden, *given, *([torch.stack(routed)] if routed else []))
        labels = microbatch.target[0] if microbatch is not None and microbatch.target else None
        named = place.named(given)
        return self._checked_outputs(*place.shell.end(named, hidden, routed, labels))

    def _checked_outputs(self, *outputs: Tensor | None) -> OptionalTensors:
        """The first time, outputs must not depend on parameters of other blocks: their gradients would be lost."""
        if not self._checked and torch.is_grad_enabled():
            own = {id(p) for p in self.parameters()}
            for parameter in _reached([t for t in outputs if t is not None]):
                if id(parameter) not in own:
                    raise ValueError(
                        f"layer {self.number} ({type(self.layer).__name__}) depends on a parameter "
                        f"{list(parameter.shape)} of another by another way than the hidden states; allowed: a chain"
                    )
            self._checked = True
        return outputs


class LanguageModelStage(nn.Module):
    """The part of a causal LM that one stage holds; its parameters have the names that they have in the model.

    ``blocks`` are what the engine plays, ``tied`` the parameters that another stage has, too.
    """

    def __init__(
        self, place: Place, blocks: list[Layer], kept: Mapping[str, nn.Module], tied: Mapping[str, nn.Parameter]
    ) -> None:
        super().__init__()
        self.__dict__["kept"] = dict(kept)
        self.hang(self)
        # Not registered: the names of parameters are those of the model alone.
        self.__dict__ |= {"place": place, "blocks": blocks, "tied": dict(tied)}

    def hang(self, root: nn.Module) -> None:
        """Registers the modules of this stage in another, by their names in the model."""
        for name, module in self.__dict__["kept"].items():
            _hang(root, name, module)

    def forward(self, *inputs: Tensor | None) -> Any:
        """Runs the stage by itself: the same in and out as its blocks'."""
        handed: Any = inputs
        for block in self.__dict__["blocks"]:
            handed = block(*handed)
        return handed


def _hang(root: nn.Module, name: str, module: nn.Module) -> None:
    """Registers a module under a dotted name."""
    *path, last = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        child = root._modules[part]
        assert child is not None
        root = child
    root.add_module(last, module)


@contextmanager
def _recording() -> Iterator[list[Tensor]]:
    """Router logits that gates compute inside, in this forward alone."""
    here: list[Tensor] = []
    token = _ROUTED.set(here)
    try:
        yield here
    finally:
        _ROUTED.reset(token)


def _recorder(index: int) -> Any:
    def record(module: nn.Module, args: Any, output: Any) -> None:
        here = _ROUTED.get()
        if here is not None:
            here.append(output[index] if isinstance(output, tuple) else output)

    return record


def _reached(outputs: Sequence[Tensor]) -> Iterator[nn.Parameter]:
    """Parameters that a graph ends in."""
    seen: set[Any] = set()
    waiting: list[Any] = [t.grad_fn for t in outputs if t.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(leaf := getattr(node, "variable", None), nn.Parameter):
            yield leaf
        waiting += [following for following, _ in node.next_functions if following is not None]
