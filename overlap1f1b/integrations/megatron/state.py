"""Streams of random numbers of Megatron-Core's tracker: each forward has its own ones, also while it is suspended.

What a forward keeps elsewhere, such as on a dispatcher, the engine learns (``engine/run/attributes.py``).
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from overlap1f1b.integrations.megatron.config import TRACKER

RANDOM = "megatron.core.tensor_parallel.random"


class Repeating:
    """Context of a second forward: random numbers as at its first one, and losses that are logged once in tables."""

    def __init__(self, random: Any, tables: Sequence[dict[str, Any]]) -> None:
        self._random, self._tables = random, tables
        self._states = random._get_all_rng_states()

    def __enter__(self) -> None:
        self._outside = self._random._get_all_rng_states()
        self._random._set_all_rng_states(*self._states)
        entries = (entry for table in self._tables for entry in table.values())
        each = (one for entry in entries for one in (entry.values() if isinstance(entry, dict) else (entry,)))
        self._logged = [(t, t.clone()) for t in each if isinstance(t, Tensor) and t.is_floating_point()]

    def __exit__(self, *_: object) -> None:
        self._random._set_all_rng_states(*self._outside)
        for tensor, before in self._logged:
            tensor.copy_(before)


class TrackerStreams:
    """The streams of a :func:`tracker`, whose ``fork()`` writes into the dictionary of their states.

    It implements :class:`~overlap1f1b.engine.run.model.CarriedState`.
    """

    def __init__(self, tracker: Any) -> None:
        self._tracker = tracker
        self._outside: dict[str, Any] = {}  # states while no forward runs

    def begin(self, seed: int) -> None:
        """Let the streams of a new forward follow from the present ones and from a seed of its microbatch and step."""
        self.enter({key: _reseeded(state, seed) for key, state in self._tracker.states_.items()})

    def leave(self) -> dict[str, Any]:
        """Return the states of the running forward, and put back what was there before."""
        states: dict[str, Any] = self._tracker.states_
        self._tracker.states_ = self._outside
        return states

    def enter(self, states: dict[str, Any]) -> None:
        """Put on the states of a forward."""
        self._outside, self._tracker.states_ = self._tracker.states_, states


def tracker() -> Any:
    """Return Megatron-Core's tracker of this process; None if it is not imported, or has no states to be set."""
    random: Any = sys.modules.get(RANDOM)
    found = None if random is None else getattr(random, TRACKER)()
    return found if hasattr(found, "states_") else None


def _reseeded(state: Any, seed: int) -> Any:
    """Return the state of another stream, which follows from the state and the seed."""
    if not isinstance(state, Tensor):  # the generator of a graph, which is refused in other ways
        return state
    digest = hashlib.blake2b(state.numpy().tobytes() + seed.to_bytes(16, "big", signed=True), digest_size=7).digest()
    number = int.from_bytes(digest, "big")
    if state.numel() == 16:  # of a GPU: a seed and an offset, 8 bytes each
        return torch.tensor([number, 0], dtype=torch.int64, device="cpu").view(torch.uint8)
    return torch.Generator().manual_seed(number).get_state()
