"""Progress of a long command: a spinner in a terminal, a line now and then elsewhere, as in the log of a job."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Column, Table
from rich.text import Text

from overlap1f1b.terminal.output import print_lines

EVERY_S = 10.0
"""Seconds between two lines where there is no terminal."""
Say = Callable[..., None]
"""``say(text)`` shows what is done and what is left, and ``say(text, now=True)`` prints it at once, too."""


@contextmanager
def showing(screen: Console, text: str, *, to: Console | None = None) -> Iterator[Say]:
    """Yield a function that is told what is done and left, first ``text``: the line of a spinner in a terminal.

    Elsewhere a thread prints the last text every ten seconds on ``to``, by default the screen, if that is not quiet. If
    the reader of these lines is gone, they end.
    """
    if screen.quiet:
        yield lambda text, now=False: None
        return
    if screen.is_terminal:
        spinner = Spinner("dots", Text(text))
        line = Table.grid(Column(no_wrap=True, overflow="ellipsis"))
        line.add_row(spinner)

        def show(text: str, now: bool = False) -> None:
            spinner.update(text=Text(text))
            if now:
                print_lines(screen, text)

        # Not Console.status: it sends what goes to a standard output that is a file to the terminal, too.
        with Live(line, console=screen, transient=True, redirect_stdout=False, redirect_stderr=False):
            yield show
        return
    printed = _Lines(to or screen, text)
    thread = threading.Thread(target=printed.print_until_ended, name="status", daemon=True)
    thread.start()
    try:
        yield printed.say
    finally:
        printed.ended.set()
        thread.join()


class _Lines:
    def __init__(self, screen: Console, text: str) -> None:
        self.screen, self.text, self.begun = screen, text, time.monotonic()
        self.last = self.begun
        self.ended = threading.Event()

    def say(self, text: str, now: bool = False) -> None:
        self.text = text
        if now:
            self._print(text)

    def _print(self, text: str) -> None:
        self.last = time.monotonic()
        print_lines(self.screen, text)

    def print_until_ended(self) -> None:
        while not self.ended.wait(max(0.0, self.last + EVERY_S - time.monotonic())):
            if time.monotonic() >= self.last + EVERY_S:
                minutes, seconds = divmod(round(time.monotonic() - self.begun), 60)
                try:
                    self._print(f"{minutes}:{seconds:02} {self.text}")
                except OSError:  # the command finds out itself when it prints next
                    return
