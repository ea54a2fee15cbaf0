"""Streams of random numbers, one a microbatch."""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor


class RandomStream:
    """A microbatch's own stream of random numbers: its dropout does not depend on other nodes that run in between.

    As a context manager it puts its state into the generators, and the generators' own state back at the end.

    Args:
        seed: Seed of the stream; without one it is the stream of the generators themselves.
        generators: Generators that a forward may draw from.
    """

    __slots__ = ("_every", "_generators", "_outside", "_seed", "_states")

    def __init__(self, seed: int | None, generators: tuple[torch.Generator, ...]) -> None:
        self._every = generators
        self._generators = () if seed is None else generators
        self._seed = seed or 0
        self._states: list[Tensor] | None = None
        self._outside: list[Tensor] = []

    @property
    def seed(self) -> int | None:
        """Seed of the stream; None for the stream of the generators themselves."""
        return self._seed if self._generators else None

    def again(self) -> RandomStream:
        """Return a stream that repeats the numbers that this one gives next."""
        twin = copy(self)
        if not self._generators:
            twin._generators, twin._states = self._every, [generator.get_state() for generator in self._every]
        return twin

    def __enter__(self) -> None:
        self._outside = [generator.get_state() for generator in self._generators]
        for position, generator in enumerate(self._generators):
            if self._states is None:
                generator.manual_seed(self._seed)
            else:
                generator.set_state(self._states[position])

    def __exit__(self, *error: object) -> None:
        self._states = [generator.get_state() for generator in self._generators]
        for generator, state in zip(self._generators, self._outside, strict=True):
            generator.set_state(state)
        self._outside = []


def generators_of(device: torch.device) -> tuple[torch.Generator, ...]:
    """Return the generators that a forward on this device may draw from."""
    if device.type != "cuda":
        return (torch.default_generator,)
    return (torch.default_generator, torch.cuda.default_generators[device.index or 0])
