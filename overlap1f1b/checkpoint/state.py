"""States of a training run beside model and optimizer: schedules of the learning rate, dataloaders, random numbers.

    packed = pack(with_random({"scheduler": scheduler}))
    unpack(with_random({"scheduler": scheduler}), packed)

A state is stored as bytes, ``state.<name>``. If all ranks have the same, they are stored once and read by ranks of any
layout. Otherwise each rank stores its own, with its number behind the name, for ranks of the same layout.
"""

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful

from overlap1f1b.checkpoint.tensors import decoded, encoded
from overlap1f1b.schedule.values import check_kind, quoted, shortened
from overlap1f1b.transport import devices
from overlap1f1b.transport.mesh import Mesh

RANDOM = "random"

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
        gpu = devices.gpu_of(device)
        return state if gpu is None or not gpu.is_initialized() else state | {device.type: gpu.get_rng_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the states; one of a GPU only where there is one."""
        random.setstate(state["python"])
        name, keys, *rest = state["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
        torch.set_rng_state(state["cpu"])
        device = devices.present()
        if (gpu := devices.gpu_of(device)) is not None and device.type in state:
            gpu.set_rng_state(state[device.type])


def json_of(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what a run's configuration is in JSON; ``ValueError`` for other values than JSON has."""
    try:
        values: dict[str, Any] = json.loads(json.dumps(dict(config or {}), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"config={quoted(config)}: {shortened(str(error))}; allowed: JSON values") from None
    return values


def with_random(states: States | None) -> dict[str, Stateful | None]:
    """Return the states of a run, with the state of the random numbers."""
    check_kind("state", states, Mapping, None)
    for name, state in (states or {}).items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"state has the name {quoted(name)}; allowed: a letter, then letters, digits and _")
        if state is not None and not isinstance(state, Stateful):
            kind, allowed = type(state).__name__, "an object with state_dict and load_state_dict"
            raise ValueError(f"state[{name!r}] is of type {kind}; allowed: {allowed}")
    return {RANDOM: RandomState()} | dict(states or {})


def pack(states: States) -> dict[str, Tensor]:
    """Return the bytes of each state that is not None."""
    packed = {}
    for name, state in states.items():
        if state is not None:
            try:
                decoded(content := encoded(state.state_dict()))
            except Exception as error:  # pickling raises whatever the objects do
                raise ValueError(
                    f"state[{name!r}] cannot be stored: {shortened(str(error).splitlines()[0])}; allowed: tensors, "
                    "numbers, texts, and containers of these"
                ) from None
            packed[name] = content
    return packed


def unpack(states: States, packed: Mapping[str, Tensor]) -> None:
    """Give each state what was stored of it."""
    for name, content in packed.items():
        if (state := states.get(name)) is not None:
            state.load_state_dict(decoded(content))


def key_of(name: str, mesh: Mesh | None) -> str:
    """Return the name of a state's bytes; of a rank's own with a ``mesh``, which has the rank's number behind it."""
    return f"state.{name}" if mesh is None else f"state.{name}.{number_of(mesh)}"


def described(layout: Mapping[Any, int]) -> str:
    """Return a layout of ranks in words: pp 2 × dp 1 × ep 4."""
    return " × ".join(f"{name} {size}" for name, size in layout.items())


def number_of(mesh: Mesh) -> str:
    """Return this rank's number in the order of the mesh's dimensions, as names of its own bytes and buffers have."""
    return f"{list(mesh.labels.values()).index(mesh.label):05d}"


def keys_of(states: States, stored: Mapping[str, bool], mesh: Mesh, layout: Mapping[Any, int]) -> dict[str, str]:
    """Return the names of the bytes that this rank reads, by the names of their states that are not None.

    ``stored`` says of each, stored in a ``layout``, whether all ranks had the same. Random numbers of another are left
    out.
    """
    for name in stored.keys() - states.keys():
        raise ValueError(f"it has state[{name!r}], this run has none; allowed: an object for it, or None to leave it")
    keys = {}
    for name, state in states.items():
        if state is None or (name == RANDOM and (name not in stored or mesh.layout != layout)):
            continue
        if name not in stored:
            raise ValueError(f"it has no state[{name!r}]; allowed: {', '.join(sorted(stored)) or 'none'}")
        if not stored[name] and mesh.layout != layout:
            raise ValueError(
                f"it has a state[{name!r}] of each rank of {described(layout)}, this run has {described(mesh.layout)}; "
                "allowed: the same layout, or None to leave the state"
            )
        keys[name] = key_of(name, None if stored[name] else mesh)
    return keys
