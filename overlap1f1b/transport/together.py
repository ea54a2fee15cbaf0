"""Work that all ranks do at once, of which each learns whether the others could do theirs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from overlap1f1b.transport.failures import LostRankError, headline
from overlap1f1b.transport.mesh import DIMENSIONS, Mesh

T = TypeVar("T")


class _Outcome(NamedTuple):
    """What a rank's part gave, or which error it ended with."""

    value: Any = None
    error: type[Exception] | None = None
    text: str = ""
    interrupted: bool = False


class Together:
    """All ranks: an exception on one of them is raised on every one, and no wait is longer than the mesh's limit.

    >>> together = Together(engine.mesh, "the folder cannot be written")
    >>> sizes = together.each(write)  # of all ranks

    Args:
        mesh: Of all ranks.
        failed: What to say first where a rank fails.

    Raises:
        ValueError: The mesh is of some ranks only.
    """

    def __init__(self, mesh: Mesh, failed: str) -> None:
        self.mesh, self.failed = mesh, failed
        self.rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.size = math.prod(mesh.size(dimension) for dimension in DIMENSIONS)
        if self.size != world:
            raise ValueError(
                f"{failed}: the engine's mesh has {self.size} of {world} ranks; allowed: a mesh of all ranks"
            )

    def each(self, work: Callable[[], T], error: type[Exception] = RuntimeError) -> list[T]:
        """What ``work`` gives on every rank, in their order.

        Raises:
            ValueError: That of the first rank that raised one, on all ranks, with its number.
            OSError: Likewise.
            Exception: ``error`` for any other exception, on all ranks, with its type, text and rank.
            LostRankError: A rank did not answer within the limit, or was interrupted.
        """
        return self._shared(work, error, every=True)

    def first(self, work: Callable[[], T]) -> T:
        """What ``work`` gives on the first rank, or raises there, on all of them."""
        return self._shared(work if self.rank == 0 else _nothing, RuntimeError, every=False)[0]

    def _shared(self, work: Callable[[], Any], error: type[Exception], *, every: bool) -> list[Any]:
        cause: BaseException | None = None
        try:
            outcome = _Outcome(work())
        except BaseException as caught:  # the others must not wait for a rank that is interrupted either
            cause = caught
            outcome = self._failure(caught, error, every=every)
        try:
            outcomes = self._exchanged(outcome)
        finally:
            if cause is not None and not isinstance(cause, Exception):
                raise cause  # an interrupt, whether or not the others have heard of it
        for other in outcomes:
            if other.interrupted:
                raise LostRankError(other.text)
        for other in outcomes:
            if other.error is not None:
                raise other.error(other.text) from cause
        return [other.value for other in outcomes]

    def _failure(self, error: BaseException, otherwise: type[Exception], *, every: bool) -> _Outcome:
        rank = f"{self.mesh.label}: " if self.size > 1 else ""
        if not isinstance(error, Exception):
            return _Outcome(text=f"{self.failed}: {self.mesh.label} was interrupted", interrupted=True)
        if isinstance(error, ValueError):  # which says by itself what is wrong; what the first rank refuses is for all
            return _Outcome(error=ValueError, text=(rank if every else "") + str(error))
        kind = OSError if isinstance(error, OSError) else otherwise
        return _Outcome(error=kind, text=f"{self.failed}: {rank}{headline(error)}")

    def _exchanged(self, mine: _Outcome) -> list[_Outcome]:
        try:
            every = self.mesh.combined(
                {self.rank: mine}, lambda _, parts: {rank: one for part in parts for rank, one in part.items()}
            )
        except LostRankError as error:
            raise LostRankError(f"{self.failed}: {error}") from error
        return [every[rank] for rank in sorted(every)]


def _nothing() -> None:
    return None
