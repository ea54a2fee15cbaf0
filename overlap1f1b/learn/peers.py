"""The ranks that must play one plan, so that they agree on what decides about it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from overlap1f1b.transport.groups import collectives_begun, gathered
from overlap1f1b.transport.mesh import Mesh

T = TypeVar("T")


class Peers:
    """The ranks of a mesh, and ranks outside of it with which blocks communicate.

    Attributes:
        mesh: The mesh.
        outside: Groups of this rank with ranks outside of the mesh; None until they are set, or a step has shown them.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.outside: Sequence[Sequence[int]] | None = None
        self._begun: Mapping[tuple[int, ...], int] = {}  # collectives before the first step, by their ranks
        self._last_sign: float | None = None  # when ranks that wait for a search got one; None if none waits

    def begin(self) -> None:
        """Note the collectives before a step."""
        if self.outside is None:
            self._begun = collectives_begun()

    def end(self) -> None:
        """Find out with which ranks the blocks of a step have begun collectives."""
        if self.outside is None:
            begun = (ranks for ranks, number in collectives_begun().items() if number != self._begun.get(ranks))
            self.outside = [ranks for ranks in begun if not set(ranks) <= self.mesh.labels.keys()]

    def agreed(self, value: T) -> T:
        """Return the value of the first of the ranks outside of the mesh, of one that all ranks of the mesh have."""
        for ranks in self.outside or ():
            value = gathered(ranks, value, self.mesh.failures.limit)[0]
        return value

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """Return the longest times over the ranks, the same on all of them."""
        return self.agreed(self.mesh.combined(list(seconds), lambda _, every: list(map(max, zip(*every, strict=True)))))

    def made(self, make: Callable[[], T]) -> T:
        """Return what the first rank has made, or raise its ValueError: a search takes long where all search."""
        made: T | ValueError | None = None
        if not self.mesh.is_first:
            while made is None:
                made = self.first(None)
        else:
            self._last_sign = time.monotonic()
            try:
                made = make()
            except ValueError as error:
                made = error
            self._last_sign = None
            self.first(made)
        if isinstance(made, ValueError):
            raise made
        return made

    def first(self, value: T) -> T:
        """Return the first rank's value."""
        return self.mesh.combined(value, lambda _, every: every[0])

    def go_on(self, _: float) -> None:
        """Tell ranks that wait in :meth:`made` that it goes on: the limit of waits is for ranks that do nothing."""
        limit = self.mesh.failures.limit.total_seconds()
        if self._last_sign is not None and time.monotonic() > self._last_sign + limit / 4:
            self._last_sign = time.monotonic()
            self.first(None)
