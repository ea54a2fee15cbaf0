"""What the first step shows of exchanges that blocks make by themselves.

It looks on at one step, in which these exchanges run where they stand. What it has found is frozen: from then on blocks
are cut there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from overlap1f1b.cut.declaration import standing
from overlap1f1b.cut.exchanges import Forms, OwnExchange, OwnExchanges, forms_of, holds_rows, takes_gradient
from overlap1f1b.cut.stage import Stage
from overlap1f1b.plan import Op
from overlap1f1b.play.crossing import Lookout
from overlap1f1b.play.observers import Observer
from overlap1f1b.play.times import Times
from overlap1f1b.transport.calls import LibrarySplits, Splits
from overlap1f1b.transport.mesh import Mesh

BlockKey = tuple[int, int]
"""Numbers of stage and block."""


class Seen(NamedTuple):
    """An exchange of one microbatch in the first step."""

    send: list[int]
    receive: list[int]
    forms: Forms
    by_library: bool = False


class Shown(NamedTuple):
    """Exchanges of a block, the same in all microbatches so far."""

    forms: frozenset[tuple[Forms, ...]]  # tensors of all exchanges of each microbatch
    swapped: frozenset[tuple[int, int]]  # a later and an earlier exchange of the same sizes, swapped, every time

    @classmethod
    def by(cls, seen: Sequence[Seen]) -> Shown:
        """Return what one microbatch has shown."""
        pairs = combinations(enumerate(seen), 2)
        swapped = [(b, a) for (a, x), (b, y) in pairs if (x.send, x.receive) == (y.receive, y.send)]
        return cls(frozenset([tuple([exchange.forms for exchange in seen])]), frozenset(swapped))

    @classmethod
    def common(cls, every: Iterable[Shown]) -> Shown:
        """Return what several microbatches have shown, or several ranks."""
        forms, swapped = zip(*every, strict=True)
        return cls(frozenset().union(*forms), frozenset.intersection(*swapped))


class Found(NamedTuple):
    """What the first step has shown, the same on all ranks."""

    exchanges: dict[BlockKey, OwnExchanges]  # at which blocks can be cut
    standing: tuple[str, ...]  # lines about those that run where they stand, as they do in every step; of all ranks


class Discovery(Observer):
    """Finds, in the step that it looks on at, the exchanges that blocks make by themselves over the experts' ranks."""

    rehearses = True

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._ranks = () if mesh.exchanging is None else tuple(dist.get_process_group_ranks(mesh.exchanging))
        self._others = [ranks for name in ("cp", "tp") if (ranks := list(mesh.along(name))) != list(self._ranks)]
        self._seen: dict[BlockKey, dict[int, list[Seen]]] = {}  # of each block, by microbatch
        self._standing: set[str] = set()  # lines about exchanges that nothing can hide
        self._without_gradient: set[str] = set()  # blocks that exchange rows by a library without a gradient

    def begin(self, times: Times) -> None:
        """Forget what an earlier step has shown."""
        for found in (self._seen, self._standing, self._without_gradient):
            found.clear()

    def lookout(self, stage: Stage, block: int, microbatch: int) -> Lookout | None:
        """Look at a block; one that calls experts of ours is not cut at other exchanges."""
        if not self._ranks:
            return None
        name, seen = stage.names[block], list[Seen]()
        if stage.shape[block].expert_calls:
            note: Callable[..., object] = partial(self._stands, f"an exchange beside Experts, in {name},")
        else:
            self._seen.setdefault((stage.number, block), {})[microbatch] = seen
            note = partial(self._note, seen, name)
        return Lookout(self._ranks, self._others, name, note, self._standing.add)

    def _note(self, seen: list[Seen], name: str, tensors: Sequence[Tensor], splits: Splits) -> None:
        """Note an exchange of a microbatch; one without a gradient stays where it stands."""
        by_library = isinstance(splits, LibrarySplits)
        if takes_gradient(tensors):
            seen.append(Seen(splits.send, splits.receive, forms_of(tensors), by_library))
            return
        if by_library:
            self._without_gradient.add(name)
        self._stands(f"an exchange without a gradient, in {name},", tensors, splits)

    def _stands(self, what: str, tensors: Sequence[Tensor], splits: Splits) -> None:
        if holds_rows(tensors):
            self._standing.add(standing(what))

    def found(self, stages: Mapping[int, Stage]) -> Found:
        """Return the exchanges of the blocks that make any; warn of those that stay. All ranks must call this.

        Sizes that are symmetric by chance, on one rank, tell nothing. ValueError if microbatches of a block differ in
        numbers, dtypes or dimensions of its exchanges.
        """
        for line in sorted(self._standing):
            warnings.warn(line, stacklevel=2)
        library_stands = bool(self._without_gradient)
        mine: dict[BlockKey, Shown] = {}
        for block, by_microbatch in self._seen.items():
            hidden = (
                [one for one in seen if not (one.by_library and library_stands)] for seen in by_microbatch.values()
            )
            mine[block] = Shown.common(map(Shown.by, hidden))
        shown = self._mesh.combined(mine, _in_common)
        lines = self._mesh.combined(sorted(self._standing), lambda _, parts: sorted(set().union(*parts)))
        exchanges = {
            (number, block): OwnExchanges(stage.names[block], self._ranks, own, library_stands)
            for number, stage in stages.items()
            for block in range(len(stage.blocks))
            if (number, block) in shown and (own := matched(shown[number, block], stage.names[block]))
        }
        return Found(exchanges, tuple(lines))


def _in_common(_: object, parts: Sequence[Mapping[BlockKey, Shown]]) -> dict[BlockKey, Shown]:
    blocks = set().union(*parts)
    return {block: Shown.common(part[block] for part in parts if block in part) for block in blocks}


def matched(shown: Shown, name: str) -> tuple[OwnExchange, ...]:
    """Return a block's exchanges, of any shapes; ValueError for several numbers of them, dtypes or dimensions."""
    if len(shown.forms) > 1:
        numbers = sorted({len(every) for every in shown.forms})
        raise ValueError(
            f"{name} exchanges rows {' or '.join(map(str, numbers))} times, in microbatches that differ in numbers, "
            "dtypes or dimensions of exchanges; allowed: the same in each microbatch, on all ranks"
        )
    found, open_ = list[OwnExchange](), list[int]()
    for position, forms in enumerate(next(iter(shown.forms))):
        back = next((earlier for earlier in reversed(open_) if (position, earlier) in shown.swapped), -1)
        if back < 0:
            open_.append(position)
        else:
            open_.remove(back)
        found.append(OwnExchange(Op.DISPATCH if back < 0 else Op.COMBINE, back, forms))
    return tuple(found)
