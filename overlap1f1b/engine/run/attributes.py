"""Attributes that a forward sets on its modules before an exchange, and may read behind it.

Other microbatches run in between, and set the same attributes. So a suspended forward takes along what it has set
itself, and finds it again where it goes on. What it has not set stays common to all, such as a counter's last value.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from overlap1f1b.engine.run.replaced import ABSENT, put
from overlap1f1b.moe.experts import Experts

Key = tuple[int, str]
"""Number of an object, and name of its attribute."""

_OTHERS = {"torch", "overlap1f1b", "builtins", "functools", "logging", "threading"}


class ModuleAttributes:
    """Attributes that a block's forward sets on its modules, and on objects that the modules hold.

    It implements :class:`~overlap1f1b.engine.run.model.CarriedState`. While it learns which attributes change, it
    compares all of them at every exchange; later only the attributes that have changed.

    Attributes:
        learning: Whether it learns.
        known: Attributes that have changed.
    """

    def __init__(self, block: nn.Module) -> None:
        self.learning, self.known = True, set[Key]()
        self._block = block
        self._places: list[dict[str, Any]] = []
        self._before: dict[Key, Any] = {}  # at the begin of the running segment
        self._carried: dict[Key, Any] = {}  # what the forward had set in earlier segments
        self._outside: dict[Key, Any] = {}  # what was there instead

    def tables(self) -> list[dict[str, Any]]:
        """Return all tables of attributes."""
        self._places = self._places or _places(self._block)
        return self._places

    def begin(self, seed: int | None) -> None:
        """Note what is there before a forward."""
        if not self._places:
            self._places = _places(self._block)
        self.enter({})

    def enter(self, carried: dict[Key, Any]) -> None:
        """Put on what a forward has set."""
        self._carried = carried
        self._outside = {(place, name): self._places[place].get(name, ABSENT) for place, name in carried}
        for (place, name), value in carried.items():
            put(self._places[place], name, value)
        self._before = self._now()

    def look(self) -> None:
        """Learn which attributes have changed since the forward began."""
        self.known |= self._changes().keys()

    def leave(self) -> dict[Key, Any]:
        """Return what the running forward has set; put back what was there, unless this segment has set it anew."""
        changes = self._changes()
        if self.learning:
            self.known |= changes.keys()
        for (place, name), value in self._outside.items():
            if (place, name) not in changes:
                put(self._places[place], name, value)
        carried = {**self._carried, **changes}
        self._before, self._carried, self._outside = {}, {}, {}
        return carried

    def _now(self) -> dict[Key, Any]:
        if self.learning:
            every = enumerate(self._places)
            return {(place, name): value for place, attributes in every for name, value in attributes.items()}
        return {(place, name): self._places[place].get(name, ABSENT) for place, name in self.known}

    def _changes(self) -> dict[Key, Any]:
        before, now = self._before, self._now()
        return {
            key: now.get(key, ABSENT)
            for key in before.keys() | now.keys()
            if now.get(key, ABSENT) is not before.get(key, ABSENT)
        }


def _places(block: nn.Module) -> list[dict[str, Any]]:
    """Return the attributes of a block's modules, their buffers, and the attributes of objects that they hold."""
    found: dict[int, dict[str, Any]] = {}
    for module in block.modules():
        waiting = [module.__dict__, module._buffers]
        while waiting:
            attributes = waiting.pop()
            if id(attributes) not in found:
                found[id(attributes)] = attributes
                held = () if isinstance(module, Experts) else attributes.values()
                waiting += [value.__dict__ for value in held if _is_the_model_s(value)]
    return list(found.values())


def _is_the_model_s(value: Any) -> bool:
    """Return whether a value is an object of the model's own, such as a dispatcher."""
    package = type(value).__module__.partition(".")[0]
    return package not in _OTHERS and not isinstance(value, nn.Module) and hasattr(value, "__dict__")


def places(block: nn.Module, name: str, known: Any) -> Any:
    for table in _places(block):
        for key, value in table.items():
            yield f"attribute {key} {id(table)} of {name}", value
