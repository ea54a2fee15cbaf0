"""Watch a step that is played to find out where it differs, and what microbatches have changed under each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from overlap1f1b.engine.bits import sum_of_bits
from overlap1f1b.engine.play.player import Player
from overlap1f1b.engine.run.blocks import Blocks
from overlap1f1b.engine.run.microbatch import Microbatch
from overlap1f1b.plan import Node
from overlap1f1b.schedule import Kind

Mark = tuple[Any, object]
"""A value, and what else tells whether it has changed: a tensor's version, or the contents of a container."""


class Witness:
    """Notes, inside its context, what every compute node hands on, and what others change between a microbatch's nodes.

    Args:
        stages: The stages of this rank.
        player: Plays the nodes.

    Attributes:
        bits: Sum over the bits of all that each compute node has handed on.
    """

    def __init__(self, stages: Mapping[int, Blocks], player: Player) -> None:
        self._stages, self._player = stages, player
        self.bits: dict[Node, int] = {}
        self._sums: dict[Node, Tensor] = {}

    def __enter__(self) -> Witness:
        self._compute, self._player.compute = self._player.compute, self._watched
        return self

    def __exit__(self, *_: object) -> None:
        self._player.compute = self._compute
        self.bits = {node: int(bits) for node, bits in self._sums.items()}

    def _watched(self, node: Node, microbatch: Microbatch, received: Mapping[Any, Any]) -> None:
        self._compute(node, microbatch, received)
        handed = [sum_of_bits(tensor, ordered=True) for tensor in _handed_on(node, microbatch)]
        if handed:
            self._sums[node] = torch.stack(handed).sum()

    def changed(self, node: Node | None) -> list[str]:
        return []


def _handed_on(node: Node, microbatch: Microbatch) -> Iterator[Tensor]:
    """Yield what a compute node has left for the next one: rows to send, activations, or gradients."""
    if node.kind is Kind.W:
        return
    forward, run = node.kind is Kind.F, microbatch.runs.get(node.block)
    for sent in () if run is None else run.sent.values():
        rows = sent.rows if isinstance(sent.rows, tuple | list) else (sent.rows,)
        yield from (tensor for tensor in rows if isinstance(tensor, Tensor))
    for tensors in (microbatch.activations, microbatch.outputs) if forward else (microbatch.output_grads, microbatch.input_grads):
        yield from (tensor for tensor in tensors or () if tensor is not None)
