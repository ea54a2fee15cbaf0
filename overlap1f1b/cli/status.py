"""What a long command is doing: a spinner in a terminal, a line now and then elsewhere, as in the log of a job."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

EVERY_S = 10.0
"""Seconds between two lines where there is no terminal."""

Say = Callable[[str], None]


@contextmanager
def showing(screen: Console, text: str) -> Iterator[Say]:
    """Yield a function that is told what begins; without a terminal its last text is printed every ten seconds.

    Args:
        screen: Console of the command; nothing is printed if it is quiet.
        text: What begins now.
    """
    if screen.is_terminal or screen.quiet:
        with screen.status(text) as shown:
            yield shown.update
        return
    lines = _Lines(screen, text)
    thread = threading.Thread(target=lines.print_until_ended, name="status", daemon=True)
    thread.start()
    try:
        yield lines.say
    finally:
        lines.ended.set()
        thread.join()


class _Lines:
    def __init__(self, screen: Console, text: str) -> None:
        self.screen, self.text, self.begun = screen, text, time.monotonic()
        self.ended = threading.Event()

    def say(self, text: str) -> None:
        self.text = text

    def print_until_ended(self) -> None:
        while not self.ended.wait(EVERY_S):
            minutes, seconds = divmod(round(time.monotonic() - self.begun), 60)
            self.screen.print(f"{minutes}:{seconds:02} {self.text}", markup=False, highlight=False, soft_wrap=True)
