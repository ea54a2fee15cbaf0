"""Buffers that a block's forward changes, such as running means: a second forward gets the values of the first."""

from typing import Any

import torch
from torch import Tensor, nn

from overlap1f1b.cut.replacement import Replacement


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; 0 for one that does not count."""
    return 0 if tensor.is_inference() else tensor._version


class Buffers:
    """The buffers of a block.

    It copies all of them until a whole forward has shown which ones change; later only these, so tables and masks are
    held once. Modules that are set to training or evaluation show it anew.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._owners: list[nn.Module] = []
        self._first: dict[tuple[int, str], tuple[Any, int]] = {}  # a buffer and its version, when it was first seen
        self._changing: set[tuple[int, str]] = set()
        self._shown: set[tuple[bool, ...]] = set()  # modes of the owners in which a forward has ended

    def copies(self) -> list[Replacement]:
        """Return copies of the buffers that change, and where to put them for a second forward."""
        if not self._owners:
            self._owners.extend(module for module in self._block.modules() if module._buffers)
        # Until a forward in this mode has shown which change: all of them.
        every, found = self._mode() not in self._shown, list[Replacement]()
        for number, owner in enumerate(self._owners):
            for name, value in owner._buffers.items():
                key, now = (number, name), 0 if value is None else version_of(value)
                first, version = self._first.setdefault(key, (value, now))
                if every or key in self._changing or first is not value or version != now:
                    found.append((owner._buffers, name, None if value is None else value.detach().clone()))
        return found

    def ended(self, copies: list[Replacement]) -> None:
        """Note what has changed in a forward; ``copies`` are of its start."""
        mode = self._mode()
        if mode in self._shown:
            return
        self._shown.add(mode)
        before = {(id(table), name): value for table, name, value in copies}
        for number, owner in enumerate(self._owners):  # by value: batch norm does not count its changes
            for name, value in owner._buffers.items():
                copy = before.get((id(owner._buffers), name))
                if copy is None or value is None or not torch.equal(copy, value):
                    self._changing.add((number, name))

    def _mode(self) -> tuple[bool, ...]:
        return tuple([owner.training for owner in self._owners])
