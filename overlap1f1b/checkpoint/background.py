"""A checkpoint that is written while the next steps run."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from threading import Thread


class Saving(Future[Path]):
    """A checkpoint that a thread may still write: a future of its path, as of DCP's ``async_save``.

    >>> saving = save_checkpoint(engine, "runs/x", step, optimizer, background=True)
    >>> engine.step(inputs, target=target)
    >>> saving.result()
    PosixPath('runs/x/step-00000100')

    ``result()`` raises, on every rank, an OSError if a rank cannot write, or a RuntimeError as ``save_checkpoint``. The
    interpreter does not end before the thread has.
    """

    def __init__(self) -> None:
        super().__init__()
        self._asked = False

    def begin(self, write: Callable[[], Path]) -> None:
        """Call ``write``, which returns the path, in a thread."""

        def run() -> None:
            try:
                self.set_result(write())
            except BaseException as error:
                self.set_exception(error)

        Thread(target=run, name="overlap1f1b-checkpoint").start()

    def result(self, timeout: float | None = None) -> Path:
        self._asked = True
        return super().result(timeout)

    def settle(self) -> None:
        """Wait; raise the error of the checkpoint if :meth:`result` has not been asked."""
        error = self.exception()
        if error is not None and not self._asked:
            raise error
