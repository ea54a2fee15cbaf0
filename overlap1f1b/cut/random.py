"""Streams of random numbers, one a microbatch, and the blocks that draw from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import product

import torch
from torch import Tensor, nn

from overlap1f1b.transport import devices


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
        stream._states = _states(generators)
        return stream

    def __enter__(self) -> None:
        self._outside = _states(self._generators)
        for position, generator in enumerate(self._generators):
            if self._states is None:
                generator.manual_seed(self.seed)
            else:
                generator.set_state(self._states[position])

    def __exit__(self, *error: object) -> None:
        self._states = _states(self._generators)
        for generator, state in zip(self._generators, self._outside, strict=True):
            generator.set_state(state)
        self._outside = []


_NO_CONTEXT = nullcontext()


class Draws:
    """Blocks that draw random numbers, as their first forwards have shown: only these enter their streams.

    A block that draws for the first time in a later step draws from the thread's own generators in that step. From the
    next step on all blocks enter their streams. ``always`` says that a block must enter in any case: parts of its
    forward are computed again.
    """

    def __init__(self, blocks: Sequence[nn.Module], generators: tuple[torch.Generator, ...]) -> None:
        self._blocks, self._generators = blocks, generators
        self._draws: dict[tuple[int, bool], bool] = {}  # whether a block draws, by its number and training mode

    def within(self, block: int, stream: RandomStream, *, always: bool) -> AbstractContextManager[None]:
        """Return the context of a segment of a block."""
        key = block, self._blocks[block].training
        draws = self._draws.get(key)
        if always or draws:
            return stream
        return _NO_CONTEXT if draws is False else self._watched(key, stream)

    @contextmanager
    def _watched(self, key: tuple[int, bool], stream: RandomStream) -> Iterator[None]:
        with stream:
            before = _states(self._generators)
            yield
            if not all(map(torch.equal, before, _states(self._generators))):
                self._draws[key] = True

    def forwarded(self, block: int, *, always: bool) -> None:
        """Note that a block has run a whole forward."""
        if not always:
            self._draws.setdefault((block, self._blocks[block].training), False)

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Check, at the end of a step, that no block has drawn outside its stream."""
        before = None if all(self._draws.values()) else _states(self._generators)
        yield
        if before is not None and not all(map(torch.equal, before, _states(self._generators))):
            self._draws.update(dict.fromkeys(product(range(len(self._blocks)), (False, True)), True))


def _states(generators: Sequence[torch.Generator]) -> list[Tensor]:
    return [generator.get_state() for generator in generators]


def generators_of(device: torch.device) -> tuple[torch.Generator, ...]:
    """Return the generators that a forward on this device may draw from."""
    gpu = devices.gpu_of(device)
    own = () if gpu is None else (gpu.default_generators[device.index or 0],)
    return (torch.default_generator, *own)
