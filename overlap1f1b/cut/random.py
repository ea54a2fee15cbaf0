"""Blocks that draw random numbers, and the generators that they draw from."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from overlap1f1b.transport import devices

_NO_CONTEXT = nullcontext()


class Draws:
    """Blocks that draw random numbers, as their first forwards have shown: only these enter their streams.

    A block that draws for the first time in a later step draws from the thread's own generators in that step, which are
    then put back. From the next step on all blocks enter their streams. ``always`` says that a block must enter in any
    case: parts of its forward are computed again. ``generators`` are those that a forward may draw from.
    """

    def __init__(self, blocks: Sequence[nn.Module], generators: tuple[torch.Generator, ...]) -> None:
        self._blocks, self.generators = blocks, generators
        self._draws: dict[tuple[int, bool], bool] = {}  # whether a block draws, by its number and training mode

    def within(self, block: int, stream: AbstractContextManager[None], *, always: bool) -> AbstractContextManager[None]:
        """Return the context of a segment of a block."""
        key = block, self._blocks[block].training
        draws = self._draws.get(key)
        if draws:
            return stream
        return self._watched(key, stream) if always or draws is None else _NO_CONTEXT

    def knows(self, block: int) -> bool:
        """Return whether a block has shown, in its training mode, if it draws."""
        return (block, self._blocks[block].training) in self._draws

    def through(self, blocks: Iterable[int], stream: AbstractContextManager[None]) -> AbstractContextManager[None]:
        """Return the context of known blocks that run one after another."""
        if True not in self._draws.values():
            return _NO_CONTEXT
        return stream if any(self._draws[block, self._blocks[block].training] for block in blocks) else _NO_CONTEXT

    @contextmanager
    def _watched(self, key: tuple[int, bool], stream: AbstractContextManager[None]) -> Iterator[None]:
        with stream:
            before = states_of(self.generators)
            yield
            if not same(before, states_of(self.generators)):
                self._draws[key] = True

    def forwarded(self, block: int) -> None:
        """Note that a block has run a whole forward."""
        self._draws.setdefault((block, self._blocks[block].training), False)

    def drawn_outside(self) -> None:
        """Note that some block has drawn outside its stream."""
        self._draws.update(((number, block.training), True) for number, block in enumerate(self._blocks))

    @property
    def any(self) -> bool | None:
        """Whether a block draws in its present mode; None while that is unknown."""
        known = [self._draws.get((number, block.training)) for number, block in enumerate(self._blocks)]
        return True if True in known else None if None in known else False


def same(states: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return whether nothing was drawn between the states of some generators and later ones."""
    # As words, since torch compares bytes one by one.
    words, later = ([state.view(torch.int32) for state in every] for every in (states, others))
    return all(map(torch.equal, words, later))


def states_of(generators: Sequence[torch.Generator]) -> list[Tensor]:
    """Return the present states of some generators."""
    return [generator.get_state() for generator in generators]


def generators_of(device: torch.device) -> tuple[torch.Generator, ...]:
    """Return the generators that a forward on this device may draw from."""
    gpu = devices.gpu_of(device)
    own = () if gpu is None else (gpu.default_generators[device.index or 0],)
    return (torch.default_generator, *own)
