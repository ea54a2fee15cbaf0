"""Places in which a forward keeps something from before an exchange until behind it.

Other microbatches run in between, and use the same places. So a suspended forward takes along what it has set itself,
and finds it again where it goes on. What it has not set stays common to all, such as a counter's last value.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, MutableMapping
from operator import is_
from types import MemberDescriptorType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

from overlap1f1b.cut.blocks import CarriedState
from overlap1f1b.cut.replacement import ABSENT, is_table, put
from overlap1f1b.moe.experts import Experts

Key = tuple[int, Any]
"""Number of a place's owner, and a name in the place."""

_OTHERS = {"torch", "overlap1f1b", "builtins", "functools", "logging", "threading"}
_LIBRARIES = _OTHERS | sys.stdlib_module_names  # whose class attributes and globals are not looked at
_CARRIED = "_overlap1f1b_carried"
_TORCHS = vars(nn.Module()).keys()  # parameters, hooks, submodules


class Carried(NamedTuple):
    """What a suspended forward takes along."""

    values: dict[Key, Any]  # that it has set
    starts: dict[Key, Any]  # what was there before it set them
    own: Any = None  # of the block's own state


class ModuleAttributes:
    """The places that a block's forward changes before an exchange; their values travel with its microbatch.

    While it learns which places change, it compares all of them at every exchange; later only the ones that have
    changed. Where a forward is suspended, what was there before is put back. The exception are values that stay when a
    forward has ended, such as a counter: others see them at once. ``own`` is state that the block carries by itself.
    """

    def __init__(self, block: nn.Module, own: CarriedState | None = None) -> None:
        self.learning = True
        self.known: dict[Key, MutableMapping[Any, Any]] = {}  # tables of the values that have changed
        self._block, self._own = block, own
        self._staying = set[Key]()
        self._places: dict[int, Place] = {}  # while it learns
        self._made = False  # whether a forward has made objects
        self._copies: dict[int, dict[Any, Any]] = {}  # of all places, at the begin of the running segment
        self._before: list[Any] = []  # known values, at the begin of the running segment
        self._carried = Carried({}, {})  # what the forward had set in earlier segments
        self._outside: dict[Key, Any] = {}  # what was there instead, where it differs

    @property
    def carries(self) -> bool:
        """Whether anything has to be carried, as far as is known."""
        return self.learning or bool(self.known) or self._own is not None

    @property
    def places(self) -> dict[int, Place]:
        """All places, by the number of their owner."""
        return places_of(self._block)

    def begin(self, seed: int) -> None:
        """Note what is there before a forward."""
        if not self.learning:
            self._places.clear()  # among them may be objects that a forward has made
        elif not self._places:
            self._places = places_of(self._block)
        if self._own is not None:
            self._own.begin(seed)
        self._put_on(Carried({}, {}))

    def enter(self, carried: Carried) -> None:
        """Put on what a forward has set."""
        if self._own is not None:
            self._own.enter(carried.own)
        self._put_on(carried)

    def _put_on(self, carried: Carried) -> None:
        self._carried, self._outside = carried, {}
        for key, value in carried.values.items():
            if key not in self.known:  # of an object that was made anew since
                continue
            table, name = self.known[key], key[1]
            there = table.get(name, ABSENT)
            if there is not value:  # another forward was here
                self._outside[key] = there
                put(table, name, value)
        self._before = [table.get(name, ABSENT) for (_, name), table in self.known.items()]
        if self.learning:
            self._copies = {number: dict(place.all) for number, place in self._places.items()}

    def look(self) -> None:
        """Learn which places have changed since the running segment began."""
        for number, before in self._copies.items():
            place = self._places[number]
            if len(before) == len(place.all) and all(map(is_, before.values(), place.all.values())):
                continue
            for name in before.keys() | place.all.keys():
                key, old, now = (number, name), before.get(name, ABSENT), place.all.get(name, ABSENT)
                if now is not old and key not in self.known and not _is_pythons(name):
                    self.known[key] = place.table
                    self._before.append(old)

    def leave(self, *, ended: bool) -> Carried:
        """Return what the running forward has set, and put back what was there, unless it has ended."""
        if self.learning and not ended:
            self.look()
        values, starts, _ = self._carried
        changes, back = dict[Key, Any](), self._outside
        for (key, table), before in zip(self.known.items(), self._before, strict=True):
            now = table.get(key[1], ABSENT)
            if now is not before:
                changes[key] = now
                back.setdefault(key, before)
                self._made |= self.learning and _may_hold(now)
        values |= changes
        for key, there in back.items():
            if key not in self._staying:
                starts.setdefault(key, there)
            if (key not in changes) if key in self._staying else not ended:
                put(self.known[key], key[1], there)
        if ended:
            self._staying |= {key for key, start in starts.items() if values[key] is not start}
            if self._made:
                self._made = False
                self._places = places_of(self._block)
                self.known = {key: table for key, table in self.known.items() if key[0] in self._places}
        self._copies, self._before, self._carried, self._outside = {}, [], Carried({}, {}), {}
        return Carried(values, starts, None if self._own is None else self._own.leave())


# ------------------------------------------------------------------------------------------------------------- places


class Place(NamedTuple):
    """A table of values that a forward may set, and what is said before and after one of its names."""

    table: MutableMapping[Any, Any]
    all: Mapping[Any, Any]  # the same, faster where all of it is read
    before: str
    after: str
    shared: bool = False  # with whatever else uses a class or a file


def carried(block: nn.Module, *holders: object) -> None:
    """Let what a block's forward sets on objects beside its modules travel with its microbatch.

    Places that the engine finds by itself need no call: attributes of a block's modules, of objects that they hold, of
    their classes, and globals of the files that define these.

    >>> class Recipe:
    ...     scale = 1.0
    >>> carried(nn.Linear(2, 2), Recipe)  # a forward sets Recipe.scale before its experts, and reads it behind them

    Args:
        block: The block, before its first step.
        holders: Objects, classes and dictionaries, whose entries travel; modules of Python, whose globals do.
    """
    held = (vars(holder) if isinstance(holder, ModuleType) else holder for holder in holders)
    vars(block).setdefault(_CARRIED, []).extend(held)


def places_of(holder: object, name: str = "") -> dict[int, Place]:
    """Return the places of a module or an object and of what it holds, by the number of their owner."""
    waiting: list[tuple[Any, str]] = [(holder, name)]
    found: dict[int, Place] = {}
    seen: dict[int, Any] = {}
    while waiting:
        held, path = waiting.pop()
        if id(held) in seen or not _may_hold(held) or (isinstance(held, nn.Module) and _is_around(held, holder)):
            continue
        seen[id(held)] = held  # so that no other gets its number
        inside: Iterable[tuple[Any, Any]] = ()
        if is_table(held):
            found.setdefault(id(held), Place(held, held, "entry ", f" of {path}"))
            inside = list(held.items())  # a look at a value may import something
        elif isinstance(held, list | tuple):
            inside = enumerate(held)
        elif isinstance(held, type):
            waiting += _of_class(held, found)
        else:
            owned = _add_attributes(held, path, found)
            waiting += [(kind, "") for kind in type(held).__mro__] if owned else []
            if isinstance(held, nn.Module):
                found.setdefault(id(held._buffers), Place(held._buffers, held._buffers, "buffer ", f" of {path}"))
                waiting += [(module, f"{path}.{name}") for name, module in held._modules.items()]
            for table in () if isinstance(held, Experts) else owned:
                waiting += [(value, f"{path}.{name}") for name, value in table.items() if name not in _TORCHS]
        for key, value in inside:
            if _may_hold(value):
                waiting.append((value, f"{path}[{key if isinstance(key, str | int) else type(key).__name__}]"))
    return found


def places(block: nn.Module, name: str, known: Container[Key] = ()) -> Iterator[tuple[str, Any]]:
    """Yield what a block's forward may set, as ``("attribute 'order' of Dispatcher in NAME.dispatcher", value)``.

    Places that :class:`ModuleAttributes` knows are left out.
    """
    for number, place in places_of(block, name).items():
        for key, value in place.all.items():
            if not _is_pythons(key) and (number, key) not in known:
                yield f"{place.before}{key}{place.after}", value


class _Attributes(MutableMapping[str, Any]):
    """Attributes of a class, or those of an object that are in slots."""

    def __init__(self, owner: object, names: Mapping[str, Any]) -> None:
        self._owner, self._names = owner, names
        self._kind: Any = type if isinstance(owner, type) else object

    def __getitem__(self, name: str) -> Any:
        value = self._names[name]
        try:
            return value if self._kind is type else value.__get__(self._owner)
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        self._kind.__setattr__(self._owner, name, value)

    def __delitem__(self, name: str) -> None:
        self._kind.__delattr__(self._owner, name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _add_attributes(held: Any, path: str, found: dict[int, Place], *, shared: bool = False) -> list[Mapping[str, Any]]:
    """Add the attributes of an object; return the tables."""
    owned, tables = getattr(held, "__dict__", None), list[Mapping[str, Any]]()
    around = "attribute '", f"' of {type(held).__name__} in {path}"
    if isinstance(owned, dict):
        tables.append(owned)
        found.setdefault(id(owned), Place(owned, owned, *around, shared))
    kinds = [kind for kind in reversed(type(held).__mro__) if "__slots__" in vars(kind)]
    slots = {k: slot for kind in kinds for k, slot in vars(kind).items() if isinstance(slot, MemberDescriptorType)}
    if slots:
        table = _Attributes(held, slots)
        tables.append(table)
        found.setdefault(id(held), Place(table, table, *around, shared))
    return tables


def _of_class(kind: type, found: dict[int, Place]) -> Iterator[tuple[Any, str]]:
    """Add the attributes of a class and the globals of its file; yield what they hold, with its name."""
    if all(_package(base) in _LIBRARIES for base in kind.__mro__):
        return
    attributes, file = vars(kind), sys.modules.get(kind.__module__)
    found[id(kind)] = Place(_Attributes(kind, attributes), attributes, f"class attribute {kind.__name__}.", "", True)
    yield from ((value, f"{kind.__name__}.{name}") for name, value in list(attributes.items()) if not _is_pythons(name))
    if file is None or _package(kind) in _LIBRARIES or id(vars(file)) in found:
        return
    name = os.path.basename(getattr(file, "__file__", None) or file.__name__)
    found[id(vars(file))] = Place(vars(file), vars(file), "global ", f" of {name}", True)
    for own, value in list(vars(file).items()):
        if isinstance(value, type):
            yield from [(value, "")] if value.__module__ == kind.__module__ else []
        elif not _is_pythons(own) and _may_hold(value) and not isinstance(value, nn.Module | dict | list | tuple):
            _add_attributes(
                value, f"{own} of {name}", found, shared=True
            )  # and nothing in it: a script's globals hold everything


def _may_hold(value: Any) -> bool:
    """Return whether a value is or holds something of the model's own, such as a dispatcher."""
    if isinstance(value, list | tuple | type | nn.Module) or is_table(value):
        return True
    return _package(type(value)) not in _OTHERS and not isinstance(value, Tensor | ModuleType)


def _package(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]


def _is_around(module: nn.Module, block: object) -> bool:
    return module is not block and any(inner is block for inner in module.modules())


def _is_pythons(name: Any) -> bool:
    return isinstance(name, str) and name.startswith("__")
