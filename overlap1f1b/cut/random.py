"""Blocks that draw random numbers, and the generators that they draw from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import product

import torch
from torch import Tensor, nn

from overlap1f1b.transport import devices

_NO_CONTEXT = nullcontext()


class Draws:
    """Blocks that draw random numbers, as their first forwards have shown: only these enter their streams.

    A block that draws for the first time in a later step draws from the thread's own generators in that step. From the
    next step on all blocks enter their streams. ``always`` says that a block must enter in any case: parts of its
    forward are computed again. ``generators`` are those that a forward may draw from.
    """

    def __init__(self, blocks: Sequence[nn.Module], generators: tuple[torch.Generator, ...]) -> None:
        self._blocks, self.generators = blocks, generators
        self._draws: dict[tuple[int, bool], bool] = {}  # whether a block draws, by its number and training mode

    def within(self, block: int, stream: AbstractContextManager[None], *, always: bool) -> AbstractContextManager[None]:
        """Return the context of a segment of a block."""
        key = block, self._blocks[block].training
        draws = self._draws.get(key)
        if always or draws:
            return stream
        return _NO_CONTEXT if draws is False else self._watched(key, stream)

    @contextmanager
    def _watched(self, key: tuple[int, bool], stream: AbstractContextManager[None]) -> Iterator[None]:
        with stream:
            before = states_of(self.generators)
            yield
            if not all(map(torch.equal, before, states_of(self.generators))):
                self._draws[key] = True

    def forwarded(self, block: int, *, always: bool) -> None:
        """Note that a block has run a whole forward."""
        if not always:
            self._draws.setdefault((block, self._blocks[block].training), False)

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Check, at the end of a step, that no block has drawn outside its stream."""
        before = None if all(self._draws.values()) else states_of(self.generators)
        yield
        if before is not None and not all(map(torch.equal, before, states_of(self.generators))):
            self._draws.update(dict.fromkeys(product(range(len(self._blocks)), (False, True)), True))


def states_of(generators: Sequence[torch.Generator]) -> list[Tensor]:
    """Return the present states of some generators."""
    return [generator.get_state() for generator in generators]


def generators_of(device: torch.device) -> tuple[torch.Generator, ...]:
    """Return the generators that a forward on this device may draw from."""
    gpu = devices.gpu_of(device)
    own = () if gpu is None else (gpu.default_generators[device.index or 0],)
    return (torch.default_generator, *own)
