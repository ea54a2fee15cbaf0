"""Streams of random numbers, one a microbatch."""

from __future__ import annotations

import torch
from torch import Tensor

from overlap1f1b.cut.random import states_of


class RandomStream:
    """A microbatch's own stream of random numbers: its dropout does not depend on other nodes that run in between.

    As a context manager it puts its state into the generators, and the generators' own state back at the end.
    """

    __slots__ = ("_generators", "_outside", "_states", "seed")

    def __init__(self, seed: int, generators: tuple[torch.Generator, ...]) -> None:
        self.seed, self._generators = seed, generators
        self._states: list[Tensor] | None = None
        self._outside: list[Tensor] = []

    @classmethod
    def here(cls, generators: tuple[torch.Generator, ...]) -> RandomStream:
        """Return a stream that repeats the numbers that the generators give next."""
        stream = cls(0, generators)
        stream._states = states_of(generators)
        return stream

    def __enter__(self) -> None:
        self._outside = states_of(self._generators)
        for position, generator in enumerate(self._generators):
            if self._states is None:
                generator.manual_seed(self.seed)
            else:
                generator.set_state(self._states[position])

    def __exit__(self, *error: object) -> None:
        self._states = states_of(self._generators)
        for generator, state in zip(self._generators, self._outside, strict=True):
            generator.set_state(state)
        self._outside = []
