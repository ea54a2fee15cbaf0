"""Places where a forward may keep a tensor: functions of a block that return how to put it there, and get it."""

import contextvars
import sys
import tempfile
import threading
import types
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

Put, Get = Callable[[Tensor], None], Callable[[], Tensor]
KEPT: dict[int, Tensor] = {}
ORDER: Tensor | None = None


class Plain:
    kept: Any = None


@dataclass(slots=True, weakref_slot=True, eq=False)
class Slots:
    kept: Any = None


class Shared:
    kept: Any = None


def _attribute(holder: Any) -> tuple[Put, Get]:
    return lambda x: setattr(holder, "kept", x), lambda: holder.kept


def _entry(table: Any, key: Any) -> tuple[Put, Get]:
    return lambda x: table.__setitem__(key, x), lambda: table[key]


def _closure() -> tuple[Put, Get]:
    kept: Any = None

    def put(x: Tensor) -> None:
        nonlocal kept
        kept = x

    return put, lambda: kept


def _default() -> tuple[Put, Get]:
    def get(kept: list[Any] = []) -> Any:  # noqa: B006  the place that is meant
        return kept[0]

    return lambda x: get.__defaults__[0].__setitem__(slice(None), [x]), get  # type: ignore[index]


def _generator() -> tuple[Put, Get]:
    def keep() -> Any:
        kept: Any = None
        while True:
            given = yield kept
            kept = kept if given is None else given

    kept = keep()
    next(kept)
    return kept.send, lambda: next(kept)


def _global() -> tuple[Put, Get]:
    return lambda x: globals().__setitem__("ORDER", x), lambda: globals()["ORDER"]


def _file() -> tuple[Put, Get]:
    path = Path(tempfile.mkdtemp(prefix="hidden-")) / "kept"
    return lambda x: torch.save(x, path), lambda: torch.load(path)


def _context() -> tuple[Put, Get]:
    kept: contextvars.ContextVar[Tensor] = contextvars.ContextVar("kept")
    return lambda x: kept.set(x) and None, kept.get


def _in_place(make: Callable[[Tensor], Any], read: Callable[[Any], Tensor]) -> tuple[Put, Get]:
    kept: list[Any] = []

    def put(x: Tensor) -> None:
        if not kept:
            kept.append(make(x))
        kept[0][...] = x if isinstance(kept[0], Tensor) else x.numpy()

    return put, lambda: read(kept[0])


def _stack(kept: Any) -> tuple[Put, Get]:
    return kept.append, kept.pop


def _module() -> Any:
    return sys.modules.setdefault("hidden_beside", types.ModuleType("hidden_beside"))


PLACES: dict[str, Callable[[nn.Module], tuple[Put, Get]]] = {
    "the block": _attribute,
    "a child": lambda block: _attribute(block.mix),
    "a parameter": lambda block: _attribute(block.mix.weight),  # type: ignore[union-attr]
    "an object": lambda block: _attribute(_held(block, Plain())),
    "an object with slots": lambda block: _attribute(_held(block, Slots())),
    "an object in a list": lambda block: _attribute(_held(block, [Plain()])[0]),
    "an object in a dict of tuples": lambda block: _attribute(_held(block, {"a": (Slots(),)})["a"][0]),
    "an object of an object": lambda block: _attribute(_held(block, types.SimpleNamespace(a=Plain())).a),
    "a module that is not registered": lambda block: _attribute(_held(block, [nn.Identity()])[0]),
    "a dict of the block": lambda block: _entry(_held(block, {}), "kept"),
    "a dict of the file": lambda block: _entry(KEPT, id(block) % 2),
    "the class of the block": lambda block: _attribute(type(block)),
    "another class": lambda _: _attribute(Shared),
    "a global": lambda _: _global(),
    "another file's global": lambda _: _attribute(_module()),
    "a closure": lambda _: _closure(),
    "a default argument": lambda _: _default(),
    "a generator": lambda _: _generator(),
    "a function": lambda _: _attribute(lambda: None),
    "a weak dict": lambda block: _entry(WeakKeyDictionary(), block),
    "a thread's own": lambda block: _attribute(_held(block, [threading.local()])[0]),
    "a context variable": lambda _: _context(),
    "a stack": lambda block: _stack(_held(block, [])),
    "a queue": lambda block: _stack(_held(block, deque())),
    "a tensor in place": lambda _: _in_place(torch.empty_like, torch.clone),
    "an array in place": lambda _: _in_place(
        lambda x: np.empty(x.shape, np.float32), lambda kept: torch.from_numpy(kept.copy())
    ),
    "a file": lambda _: _file(),
}


def _held(block: nn.Module, value: Any) -> Any:
    block.held = value
    return value
