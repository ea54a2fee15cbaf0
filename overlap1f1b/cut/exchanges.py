"""Exchanges that blocks make by themselves, without our Experts: found in the first step, hidden in all later ones.

Three kinds are found: calls of the public ``exchange``; torch's functional ``all_to_all_single``, by whatever name it
is called; and an ``autograd.Function`` that is declared to be an all-to-all and no more
(:mod:`overlap1f1b.cut.declaration`). The first step runs them where they stand, and notes them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from itertools import combinations
from operator import and_
from typing import NamedTuple

import torch
from torch import Tensor

from overlap1f1b.plan import Op
from overlap1f1b.transport.calls import Splits
from overlap1f1b.transport.mesh import Mesh

Forms = tuple[tuple[torch.dtype, int], ...]
"""Dtype and number of dimensions of each tensor of an exchange."""


def forms_of(tensors: Sequence[Tensor]) -> Forms:
    return tuple([(tensor.dtype, tensor.ndim) for tensor in tensors])


class Seen(NamedTuple):
    """An exchange of one microbatch in the first step."""

    send: list[int]
    receive: list[int]
    forms: Forms
    by_library: bool = False


class ForeignExchange(NamedTuple):
    """An exchange of a block, the same for all microbatches.

    Args:
        op: ``COMBINE`` if its sizes are the swapped sizes of an earlier exchange; else ``DISPATCH``.
        back_of: Position of that exchange; -1 for a dispatch.
    """

    op: Op
    back_of: int
    forms: Forms


class Shown(NamedTuple):
    """Observed exchanges of a block, the same in all microbatches so far."""

    forms: frozenset[tuple[Forms, ...]]  # tensors of all exchanges of each microbatch
    swapped: frozenset[tuple[int, int]]  # a later and an earlier exchange of the same sizes, swapped, every time

    @classmethod
    def by(cls, seen: Iterable[Seen]) -> Shown:
        """Return what one microbatch has shown."""
        every = list(seen)
        pairs = combinations(range(len(every)), 2)
        swapped = [(b, a) for a, b in pairs if (every[a].send, every[a].receive) == (every[b].receive, every[b].send)]
        return cls(frozenset([tuple([one.forms for one in every])]), frozenset(swapped))

    def __and__(self, other: Shown) -> Shown:
        """Return what two microbatches have shown, or two ranks."""
        return Shown(self.forms | other.forms, self.swapped & other.swapped)


class Foreign:
    """The exchanges that the blocks of a stage make by themselves."""

    def __init__(self) -> None:
        self.ranks: Sequence[int] = ()  # global numbers of the ranks that share the experts
        self.hidden: dict[int, tuple[ForeignExchange, ...]] = {}  # by block
        self.library_stands = False
        """Whether all exchanges by a library run where they stand, since one has no gradient. Their order must be the
        same on all ranks, so they are all hidden or none."""
        self.seen: dict[int, dict[int, list[Seen]]] | None = None
        """Exchanges of the first step, by block and microbatch; None in later steps."""
        self.standing: set[str] = set()
        """What to tell of exchanges in the first step that nothing can hide."""

    def share(self, ranks: Sequence[int]) -> None:
        """Say which ranks share the experts, by their numbers in the default group."""
        self.ranks = ranks

    def look(self, blocks: Sequence[int]) -> None:
        """Note in the next step the exchanges of some blocks."""
        self.seen, self.standing = {block: {} for block in blocks}, set()

    def _hides(self, one: Seen) -> bool:
        return not (one.by_library and self.library_stands)

    def shown(self) -> dict[int, Shown]:
        """Return what this rank's microbatches have shown of each block; warn of what is not hidden."""
        for line in sorted(self.standing):
            warnings.warn(line, stacklevel=2)
        seen, self.seen = self.seen or {}, None
        return {
            block: reduce(and_, [Shown.by(filter(self._hides, every)) for every in by_microbatch.values()])
            for block, by_microbatch in seen.items()
            if by_microbatch
        }


def shown_by_all(stages: Mapping[int, Foreign], mesh: Mesh) -> dict[tuple[int, int], Shown]:
    """Return what the microbatches of all ranks have shown, by (stage, block). All ranks must call this.

    Sizes that are symmetric by chance, on one rank, tell nothing.
    """
    library_stands = any(one.library_stands for one in stages.values())
    for one in stages.values():
        one.library_stands = library_stands
    mine = {(number, block): shown for number, one in stages.items() for block, shown in one.shown().items()}
    return mesh.combined(
        mine,
        lambda _, parts: {
            place: reduce(and_, [part[place] for part in parts if place in part]) for place in set().union(*parts)
        },
    )


def matched(shown: Shown, name: str) -> tuple[ForeignExchange, ...]:
    """Return the exchanges of a block.

    Rows may have other shapes in each microbatch, such as a capacity ``[E, C, H]`` that follows its tokens. Other
    numbers, dtypes or dimensions are a ValueError; ``name`` is the block's.
    """
    if len(shown.forms) > 1:
        numbers = sorted({len(every) for every in shown.forms})
        raise ValueError(
            f"{name} exchanges rows {' or '.join(map(str, numbers))} times, in microbatches that differ in numbers, "
            "dtypes or dimensions of exchanges; allowed: the same in each microbatch, on all ranks"
        )
    found, open_ = list[ForeignExchange](), list[int]()
    for position, forms in enumerate(next(iter(shown.forms))):
        back = next((earlier for earlier in reversed(open_) if (position, earlier) in shown.swapped), -1)
        if back < 0:
            open_.append(position)
        else:
            open_.remove(back)
        found.append(ForeignExchange(Op.DISPATCH if back < 0 else Op.COMBINE, back, forms))
    return tuple(found)


def check_back(splits: Splits, earlier: Splits, where: str) -> None:
    """Check that rows travel back by the sizes of an earlier exchange; ``where`` names the later one."""
    if (splits.send, splits.receive) != (earlier.receive, earlier.send):
        raise ValueError(
            f"{where} sends {splits.send} and receives {splits.receive}; allowed: {earlier.receive} and "
            f"{earlier.send}, the sizes of the exchange whose rows it took back in the first step, swapped"
        )
