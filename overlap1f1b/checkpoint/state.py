"""States of a training run beside model and optimizer: schedules of the learning rate, dataloaders, random numbers.

    pickles = pack(with_random({"scheduler": scheduler}))
    unpack(with_random({"scheduler": scheduler}), pickles)

Each state is a file of a checkpoint. If all ranks have the same bytes, it is stored once and read by ranks of any
layout. Otherwise each rank stores its own, and only ranks of the same layout read them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Mapping
from io import BytesIO
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.stateful import Stateful

from overlap1f1b.schedule.values import quoted, shortened
from overlap1f1b.transport import devices

RANDOM = "random"
OPTIMIZER = "optimizer.pt"
"""File of an optimizer's table."""
_NAME = re.compile(r"[A-Za-z]\w*", re.ASCII)
_FILE = re.compile(r"state-([A-Za-z]\w*?)(?:-\d{5,})?\.pt", re.ASCII)

States = Mapping[str, Stateful | None]


class RandomState:
    """The states of this process's random numbers: Python's, NumPy's, torch's on the CPU and on the current GPU."""

    def state_dict(self) -> dict[str, Any]:
        """Return the states as tensors, numbers and tuples."""
        name, keys, *rest = np.random.get_state()
        state = {
            "python": random.getstate(),
            "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
            "cpu": torch.get_rng_state(),
        }
        device = devices.present()
        gpu = devices.of(device)
        return state if gpu is None or not gpu.is_initialized() else state | {device.type: gpu.get_rng_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the states; one of a GPU only where there is one."""
        random.setstate(state["python"])
        name, keys, *rest = state["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
        torch.set_rng_state(state["cpu"])
        device = devices.present()
        if (gpu := devices.of(device)) is not None and device.type in state:
            gpu.set_rng_state(state[device.type])


def with_random(states: States | None) -> dict[str, Stateful | None]:
    """Return the states of a run, with the state of the random numbers."""
    for name, state in (states or {}).items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(f"state has the name {quoted(name)}; allowed: a letter, then letters, digits and _")
        if state is not None and not isinstance(state, Stateful):
            kind = type(state).__name__
            allowed = "an object with state_dict and load_state_dict"
            raise ValueError(f"state[{name!r}] is of type {kind}; allowed: {allowed}")
    return {RANDOM: RandomState()} | dict(states or {})


def pack(states: States) -> dict[str, bytes]:
    """Return each state that is not None as the bytes of a file, which ``torch.load(weights_only=True)`` reads."""
    packed = {}
    for name, state in states.items():
        if state is not None:
            try:
                loaded(content := dumped(state.state_dict()))
            except Exception as error:  # pickling raises whatever the objects do
                raise ValueError(
                    f"state[{name!r}] cannot be stored: {shortened(str(error).splitlines()[0])}; allowed: tensors, "
                    "numbers, texts, and containers of these"
                ) from None
            packed[name] = content
    return packed


def unpack(states: States, packed: Mapping[str, bytes]) -> None:
    """Give each state what was stored of it."""
    for name, content in packed.items():
        if (state := states.get(name)) is not None:
            state.load_state_dict(loaded(content))


def dumped(value: Any) -> bytes:
    """Return the bytes of a file that has ``value``."""
    torch.save(value, file := BytesIO())
    return file.getvalue()


def loaded(content: bytes) -> Any:
    """Return the value of :func:`dumped`: tensors on the CPU, numbers, texts, and containers of these."""
    return torch.load(BytesIO(content), weights_only=True, map_location="cpu")


def file_of(name: str, number: int | None = None) -> str:
    """Return the name of a state's file; of one rank's, by its number in the order of the mesh's dimensions."""
    return f"state-{name}.pt" if number is None else f"state-{name}-{number:05d}.pt"


def choose_files(
    states: States, files: Collection[str], number: int, layout: Mapping[Any, int], stored_layout: Mapping[Any, int]
) -> dict[str, str]:
    """Return the files that a rank reads, by the names of their states; a state of None is not wanted.

    Random numbers are left out if they are missing or of another layout: ranks with data of their own draw others.

    ``number`` is this rank's in the order of the mesh's dimensions. A layout has the sizes of the dimensions.
    """
    found = {match[1] for file in files if (match := _FILE.fullmatch(file))}
    for name in found - states.keys():
        raise ValueError(f"it has state[{name!r}], this run has none; allowed: an object for it, or None to leave it")
    chosen = {}
    for name, state in states.items():
        if state is None or (name == RANDOM and (name not in found or layout != stored_layout)):
            continue
        if name not in found:
            has = ", ".join(sorted(found)) or "none"
            raise ValueError(f"it has no state[{name!r}]; allowed: {has}")
        if file_of(name) in files:
            chosen[name] = file_of(name)
        elif layout == stored_layout:
            chosen[name] = file_of(name, number)
        else:
            raise ValueError(
                f"it has a state[{name!r}] of each rank of {_text(stored_layout)}, this run has {_text(layout)}; "
                "allowed: the same layout, or None to leave the state"
            )
    return chosen


def _text(layout: Mapping[Any, int]) -> str:
    return " × ".join(f"{name} {size}" for name, size in layout.items())
