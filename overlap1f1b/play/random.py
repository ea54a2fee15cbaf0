"""Streams of random numbers, one a microbatch, and the generators of the loop around a step.

A step takes nothing from torch's generators while it is played. It reads the number that the CPU's generator gives
next, and leaves it there; the seeds of its microbatches follow from it. If blocks have drawn, ``Engine.play`` takes
that number behind the step, so that the next step draws others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from overlap1f1b.cut.random import Draws, same, states_of

T = TypeVar("T")


def take_number() -> int:
    """Take a number from torch's generator on the CPU."""
    return int(torch.randint(2**62, (), device="cpu"))


class LoopGenerators:
    """The generators as the loop around a step has left them: a feed may draw from them, blocks have their streams.

    Args:
        draws: Of the stages of this rank, which share their generators.
    """

    def __init__(self, draws: Sequence[Draws]) -> None:
        self._draws, self._generators = draws, draws[0].generators
        self._states = states_of(self._generators)

    @property
    def seed(self) -> int:
        """Of the streams of all microbatches: the number that the CPU's generator gives next."""
        before = torch.default_generator.get_state()
        try:
            return take_number()
        finally:
            torch.default_generator.set_state(before)

    def watching(self, arguments_of: Callable[[int, int], T]) -> Callable[[int, int], T]:
        """Return the function by which a feed gives inputs: what it draws is the loop's own."""

        def watched(stage: int, microbatch: int) -> T:
            before = states_of(self._generators)
            found = arguments_of(stage, microbatch)
            now = states_of(self._generators)
            self._states = self._states if same(before, now) else now
            return found

        return watched

    def end(self) -> None:
        """Put back what blocks have drawn outside of their streams, which they enter from the next step on."""
        if not same(self._states, states_of(self._generators)):
            for generator, state in zip(self._generators, self._states, strict=True):
                generator.set_state(state)
            for one in self._draws:
                one.drawn_outside()


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
