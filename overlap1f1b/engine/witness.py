"""Watch a step: where does it differ from another, and what have microbatches changed under each other?"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from overlap1f1b.engine.bits import sum_of_bits
from overlap1f1b.engine.play.player import Player
from overlap1f1b.engine.run.attributes import places
from overlap1f1b.engine.run.buffers import version_of
from overlap1f1b.engine.run.microbatch import Microbatch
from overlap1f1b.engine.run.stage import Stage
from overlap1f1b.plan import Node
from overlap1f1b.schedule import Kind

_MOST = 4  # places that a message names


class Witness:
    """Notes, inside its context, what every compute node hands on, and what others change between a microbatch's nodes.

    Attributes:
        bits: Sum over the bits of all that a compute node has handed on, once the context has ended.
    """

    def __init__(self, stages: Mapping[int, Stage], player: Player) -> None:
        self._stages, self._player = stages, player
        self.bits: dict[Node, int] = {}
        self._sums: dict[Node, Tensor] = {}
        self._left: dict[tuple[int, int], dict[str, _Value]] = {}  # by a microbatch in the places that it has changed
        self._changed: dict[str, Node] = {}  # by another microbatch meanwhile, and where this was seen first

    def __enter__(self) -> Witness:
        self._compute, self._player.compute = self._player.compute, self._watched
        return self

    def __exit__(self, *_: object) -> None:
        self._player.compute = self._compute
        self.bits = {node: int(bits) for node, bits in self._sums.items()}
        self._sums, self._left = {}, {}

    def changed(self) -> str:
        """Return the places that microbatches have changed under each other as text, the first ones first."""
        names = list(self._changed)
        more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
        return ", ".join(names[:_MOST]) + more

    def _watched(self, node: Node, microbatch: Microbatch, received: Mapping[Any, Any]) -> None:
        if node.kind is not Kind.F:
            self._compute(node, microbatch, received)
        else:
            left = self._left.setdefault((node.stage, node.microbatch), {})
            before = self._values(node)
            for name, value in left.items():
                if name in before and not before[name].is_as(value):
                    self._changed.setdefault(name, node)
            self._compute(node, microbatch, received)
            for name, value in self._values(node).items():
                if name in left or name not in before or not before[name].is_as(value):
                    left[name] = value
        sums = [sum_of_bits(tensor, ordered=True) for tensor in _handed_on(node, microbatch)]
        if sums:
            self._sums[node] = torch.stack(sums).sum()

    def _values(self, node: Node) -> dict[str, _Value]:
        """Return the values of all places that are not carried, of the blocks of a stage."""
        stage = self._stages[node.stage]
        known = {key for state in stage.attributes for key in state.known}  # blocks share classes and files
        return {
            name: _Value(value)
            for block, where in zip(stage.blocks, stage.names, strict=True)
            for name, value in places(block, where, known)
        }


class _Value:
    """A value, with what else tells whether it has changed: what a container holds, and how often tensors have."""

    __slots__ = ("parts", "versions")

    def __init__(self, value: Any) -> None:
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | set | deque) else ()
        self.parts = (value, *inside)
        self.versions = [version_of(part) for part in self.parts if isinstance(part, Tensor)]

    def is_as(self, other: _Value) -> bool:
        """Return whether nothing has changed."""
        if len(self.parts) != len(other.parts) or self.versions != other.versions:
            return False
        plain = int, float, str, bytes
        pairs = zip(self.parts, other.parts, strict=True)
        return all(a is b or (isinstance(a, plain) and isinstance(b, plain) and a == b) for a, b in pairs)


def _handed_on(node: Node, microbatch: Microbatch) -> Iterator[Tensor]:
    """Yield what a compute node has left for the next one: rows to send, activations, or gradients."""
    if node.kind is Kind.W or microbatch.finished:
        return
    run = microbatch.runs.get(node.block)
    for sent in () if run is None else run.sent.values():
        rows = sent.rows if isinstance(sent.rows, tuple | list) else (sent.rows,)
        yield from (tensor for tensor in rows if isinstance(tensor, Tensor))
    forward = (microbatch.activations, microbatch.outputs)
    for tensors in forward if node.kind is Kind.F else (microbatch.output_grads, microbatch.input_grads):
        yield from (tensor for tensor in tensors or () if tensor is not None)
