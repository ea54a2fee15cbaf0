"""A checkpoint that is written while the next steps run."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


class Saving:
    """A checkpoint that a thread writes.

    >>> saving = save_checkpoint(engine, "runs/x", step, optimizer, background=True)
    >>> engine.step(inputs, target=target)
    >>> saving.result()
    PosixPath('runs/x/step-00000100')

    The interpreter does not end before the thread has.

    Args:
        write: Writes the checkpoint and returns its path.
    """

    def __init__(self, write: Callable[[], Path]) -> None:
        executor = ThreadPoolExecutor(1, thread_name_prefix="overlap1f1b-checkpoint")
        self._future = executor.submit(write)
        executor.shutdown(wait=False)
        self._told = False

    @property
    def done(self) -> bool:
        """Whether the checkpoint is published, or has failed."""
        return self._future.done()

    def result(self) -> Path:
        """Wait until all ranks have written the checkpoint, and return its path.

        Raises:
            OSError: A rank cannot write; raised on every rank.
            RuntimeError: A rank failed in another way, or did not answer, as for ``save_checkpoint``.
        """
        self._told = True
        return self._future.result()

    def settle(self) -> None:
        """Wait; raise the error of the checkpoint if :meth:`result` has not been asked."""
        if self._told:
            self._future.exception()
        else:
            self.result()
