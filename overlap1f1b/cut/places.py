"""Places in which a forward keeps something from before an exchange until behind it.

Other microbatches run in between, and use the same places. Contract: what a forward has set before an exchange is what
it finds behind it; what it has not set, such as a counter's last value, is common to all.

    find      all tables of values that a forward may set: attributes of the block's modules, of objects that they hold,
              of their classes, globals of the files that define these, entries of dictionaries
    learn     at every exchange of the first forwards: which of these values have changed
    carry     from then on at every exchange, these values alone: see :mod:`overlap1f1b.play.values`
    name      any of them, for whoever compares microbatches
"""

import os
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, MutableMapping
from numbers import Number
from operator import is_
from types import MemberDescriptorType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

from overlap1f1b.cut.blocks import CarriedState
from overlap1f1b.cut.contents import contents_of
from overlap1f1b.cut.replacement import ABSENT, is_table
from overlap1f1b.moe.experts import Experts
from overlap1f1b.schedule.values import check_kind, quoted

Key = tuple[int, Any]
"""Number of a place's owner, and a name in the place."""

_OTHERS = {"torch", "overlap1f1b", "builtins", "functools", "logging", "threading"}
_LIBRARIES = _OTHERS | sys.stdlib_module_names  # whose class attributes and globals are not looked at
_CARRIED = "_overlap1f1b_carried"
_TORCHS = vars(nn.Module()).keys()  # parameters, hooks, submodules


class Table(NamedTuple):
    """A table of values that a forward may set, and what is said before and after one of its names."""

    values: MutableMapping[Any, Any]
    all: Mapping[Any, Any]  # the same, faster where all of it is read
    before: str
    after: str
    shared: bool = False  # with whatever else uses a class or a file


class KnownPlaces:
    """The places that forwards of a block change, as its first forwards have shown.

    Attributes:
        own: State that the block carries by itself.
        changing: Tables of the values that forwards change.
        staying: Those that keep their last value when a forward has ended, such as a counter's: all forwards see it.
        in_place: Tables of values that forwards change in place, if parts of them are computed again.
        tables: All places, while forwards show which change.
    """

    def __init__(self, block: nn.Module, own: CarriedState | None = None) -> None:
        self.block, self.own = block, own
        self.changing: dict[Key, MutableMapping[Any, Any]] = {}
        self.staying = set[Key]()
        self.in_place: dict[Key, MutableMapping[Any, Any]] = {}
        self._shown: set[str] = set()
        self.tables: dict[int, Table] = {}

    def find(self) -> None:
        """Find all places anew: a forward may have made objects, or released them."""
        self.tables.clear()
        self.tables.update(places_of(self.block))
        for key in [key for key in self.changing if key[0] not in self.tables]:
            del self.changing[key]

    def contents(self) -> dict[Key, Any]:
        """Return the contents of all values of the block's own that can change in place, until they have been shown."""
        if "in place" in self._shown:
            return {}
        buffers = {id(module._buffers) for module in self.block.modules()}  # a second forward has copies of them anyway
        own = [(n, table) for n, table in places_of(self.block).items() if not table.shared and n not in buffers]
        every = (((number, name), contents_of(value)) for number, table in own for name, value in table.all.items())
        return {key: contents for key, contents in every if contents is not None}

    def learn_in_place(self, before: Mapping[Key, Any]) -> None:
        """Add the places whose values have changed in place since their contents were taken."""
        self._shown.add("in place")
        tables = places_of(self.block) if before else {}
        for (number, name), contents in before.items():
            table = tables.get(number)
            if table is not None and contents_of(table.all.get(name)) != contents:
                self.in_place[number, name] = table.values

    def copies(self) -> dict[int, dict[Any, Any]]:
        """Return what all places hold now, by the number of their owner."""
        return {number: dict(table.all) for number, table in self.tables.items()}

    def learn(self, copies: Mapping[int, Mapping[Any, Any]]) -> Iterator[Any]:
        """Add the places that have changed since they were copied; yield what each of them held."""
        for number, before in copies.items():
            table = self.tables.get(number)
            if table is None or (len(before) == len(table.all) and all(map(is_, before.values(), table.all.values()))):
                continue
            for name in before.keys() | table.all.keys():
                key, old = (number, name), before.get(name, ABSENT)
                if table.all.get(name, ABSENT) is not old and key not in self.changing and not _is_pythons(name):
                    self.changing[key] = table.values
                    yield old


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
    check_kind("block", block, nn.Module)
    held = [vars(holder) if isinstance(holder, ModuleType) else holder for holder in holders]
    for holder in held:
        if holder is None or isinstance(holder, str | bytes | Number):
            raise ValueError(f"holder {quoted(holder)}; allowed: an object, class, dictionary or module of Python")
    vars(block).setdefault(_CARRIED, []).extend(held)


def places_of(holder: object, name: str = "") -> dict[int, Table]:
    """Return the places of a module or an object and of what it holds, by the number of their owner."""
    waiting: list[tuple[Any, str]] = [(holder, name)]
    found: dict[int, Table] = {}
    seen: dict[int, Any] = {}
    while waiting:
        held, path = waiting.pop()
        if id(held) in seen or not may_hold(held) or (isinstance(held, nn.Module) and _is_around(held, holder)):
            continue
        seen[id(held)] = held  # so that no other gets its number
        inside: Iterable[tuple[Any, Any]] = ()
        if is_table(held):
            found.setdefault(id(held), Table(held, held, "entry ", f" of {path}"))
            inside = list(held.items())  # a look at a value may import something
        elif isinstance(held, list | tuple):
            inside = enumerate(held)
        elif isinstance(held, type):
            waiting += _of_class(held, found)
        else:
            owned = _add_attributes(held, path, found)
            waiting += [(kind, "") for kind in type(held).__mro__] if owned else []
            if isinstance(held, nn.Module):
                found.setdefault(id(held._buffers), Table(held._buffers, held._buffers, "buffer ", f" of {path}"))
                waiting += [(module, f"{path}.{name}") for name, module in held._modules.items()]
            for table in () if isinstance(held, Experts) else owned:
                waiting += [(value, f"{path}.{name}") for name, value in table.items() if name not in _TORCHS]
        for key, value in inside:
            if may_hold(value):
                waiting.append((value, f"{path}[{key if isinstance(key, str | int) else type(key).__name__}]"))
    return found


def places(block: nn.Module, name: str, known: Container[Key] = ()) -> Iterator[tuple[str, Any]]:
    """Yield what a block's forward may set, as ``("attribute 'order' of Dispatcher in NAME.dispatcher", value)``.

    Places that are ``known`` to change are left out.
    """
    for number, table in places_of(block, name).items():
        for key, value in table.all.items():
            if not _is_pythons(key) and (number, key) not in known:
                yield f"{table.before}{key}{table.after}", value


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


def _add_attributes(held: Any, path: str, found: dict[int, Table], *, shared: bool = False) -> list[Mapping[str, Any]]:
    """Add the tables of an object's attributes and slots to ``found``; return them."""
    owned, tables = getattr(held, "__dict__", None), list[Mapping[str, Any]]()
    around = "attribute '", f"' of {type(held).__name__} in {path}"
    if isinstance(owned, dict):
        tables.append(owned)
        found.setdefault(id(owned), Table(owned, owned, *around, shared))
    kinds = [kind for kind in reversed(type(held).__mro__) if "__slots__" in vars(kind)]
    slots = {k: slot for kind in kinds for k, slot in vars(kind).items() if isinstance(slot, MemberDescriptorType)}
    if slots:
        table = _Attributes(held, slots)
        tables.append(table)
        found.setdefault(id(held), Table(table, table, *around, shared))
    return tables


def _of_class(kind: type, found: dict[int, Table]) -> Iterator[tuple[Any, str]]:
    """Add the attributes of a class and the globals of its file; yield what they hold, with its name."""
    if all(_package(base) in _LIBRARIES for base in kind.__mro__):
        return
    attributes, file = vars(kind), sys.modules.get(kind.__module__)
    found[id(kind)] = Table(_Attributes(kind, attributes), attributes, f"class attribute {kind.__name__}.", "", True)
    yield from ((value, f"{kind.__name__}.{name}") for name, value in list(attributes.items()) if not _is_pythons(name))
    if file is None or _package(kind) in _LIBRARIES or id(vars(file)) in found:
        return
    name = os.path.basename(getattr(file, "__file__", None) or file.__name__)
    found[id(vars(file))] = Table(vars(file), vars(file), "global ", f" of {name}", True)
    for own, value in list(vars(file).items()):
        if isinstance(value, type):
            yield from [(value, "")] if value.__module__ == kind.__module__ else []
        elif not _is_pythons(own) and may_hold(value) and not isinstance(value, nn.Module | dict | list | tuple):
            # And nothing in it: a script's globals hold everything.
            _add_attributes(value, f"{own} of {name}", found, shared=True)


def may_hold(value: Any) -> bool:
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
