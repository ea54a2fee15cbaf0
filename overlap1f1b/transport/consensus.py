"""Work on all ranks at once: an error of one rank is raised on all of them."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from overlap1f1b.transport.failures import LostRankError, headline
from overlap1f1b.transport.mesh import Mesh

T = TypeVar("T")


class _Outcome(NamedTuple):
    """Result of one rank's work, or the error that it ended with: a LostRankError if it was interrupted."""

    value: Any = None
    error: type[Exception] | None = None
    text: str = ""


class Together:
    """Work on all ranks of a mesh; an exception on one is raised on every rank, and no wait is longer than its limit.

    >>> together = Together(engine.mesh, "the folder cannot be written")  # the first words of every message
    >>> sizes = together.each(write)  # of all ranks

    ValueError if the mesh does not have all ranks.
    """

    def __init__(self, mesh: Mesh, failed: str) -> None:
        self.mesh, self.failed = mesh, failed
        self.rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.size = len(mesh.labels)
        if self.size != world:
            raise ValueError(
                f"{failed}: the engine's mesh has {self.size} of {world} ranks; allowed: a mesh of all ranks"
            )

    def each(self, work: Callable[[], T], error: type[Exception] = RuntimeError) -> list[T]:
        """Call ``work`` on every rank and return the results of all, in the order of ranks.

        If it raised a ValueError or an OSError on some rank, every rank raises it, and it names the first one; for
        anything else ``error`` with type, text and rank; LostRankError if one did not answer within the limit, or was
        interrupted.
        """
        return self._shared(work, error, every=True)

    def own(self, work: Callable[[], T]) -> T:
        """Call ``work`` on every rank as :meth:`each`; return this rank's result, which does not travel."""
        found: list[T] = []
        self.each(lambda: found.append(work()))
        return found[0]

    def first(self, work: Callable[[], T]) -> T:
        """Call ``work`` on the first rank alone; return its result, or raise its error, on every rank."""
        return self._shared(work if self.rank == 0 else lambda: None, RuntimeError, every=False)[0]

    def _shared(self, work: Callable[[], Any], error: type[Exception], *, every: bool) -> list[Any]:
        """Return the results of ``work`` by rank; raise the first error of any rank on all of them."""
        cause: BaseException | None = None
        try:
            outcome = _Outcome(work())
        except BaseException as caught:  # an interrupt too: the others must not wait for this rank
            cause = caught
            outcome = self._failure(caught, error, every=every)
        try:
            ranks = self.mesh.every(outcome)
        except LostRankError as lost:
            raise LostRankError(f"{self.failed}: {lost}") from lost
        finally:
            if cause is not None and not isinstance(cause, Exception):
                raise cause  # an interrupt, whether or not the others have heard of it
        outcomes = [ranks[rank] for rank in sorted(ranks)]
        for other in sorted(outcomes, key=lambda one: one.error is not LostRankError):
            if other.error is not None:
                raise other.error(other.text) from cause
        return [other.value for other in outcomes]

    def _failure(self, error: BaseException, otherwise: type[Exception], *, every: bool) -> _Outcome:
        rank = f"{self.mesh.label}: " if self.size > 1 else ""
        if not isinstance(error, Exception):
            return _Outcome(error=LostRankError, text=f"{self.failed}: {self.mesh.label} was interrupted")
        if isinstance(error, ValueError):  # its text needs no type, and no rank if only the first rank works
            return _Outcome(error=ValueError, text=(rank if every else "") + str(error))
        kind = OSError if isinstance(error, OSError) else otherwise
        return _Outcome(error=kind, text=f"{self.failed}: {rank}{headline(error)}")
