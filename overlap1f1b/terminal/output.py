"""Output: tables and progress on the terminal, JSON to a file or alone to standard output; checks of files before."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Column, Table
from rich.text import Text

Row = TypeVar("Row")

RANKS_SHOWN = 16  # rows of a table with a row for each rank


def console(json_target: str | None, *, quiet: bool = False) -> Console:
    """Return the console for all text: standard error if JSON goes to standard output; silent if ``quiet``."""
    screen = Console(stderr=json_target == "-", quiet=quiet)
    if not screen.is_terminal:
        screen.width = 160
    return screen


def print_lines(screen: Console, *lines: str, style: str | None = None) -> None:
    """Print lines as they are: without markup, highlights and breaks."""
    for line in lines:
        screen.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def plain_table(headings: Iterable[str], left: Iterable[str] = (), *, no_wrap: bool = False) -> Table:
    """Return a table without rows; the columns in ``left`` hold text, all others numbers."""
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right", no_wrap=no_wrap)
    return table


def middle_left_out(rows: Sequence[Row], gap: Callable[[str], Row]) -> list[Row]:
    """Return the rows, or of many the first and last ones with a row between that says how many are left out."""
    left, half = len(rows) - RANKS_SHOWN, RANKS_SHOWN // 2
    return [*rows[:half], gap(f"… {left} more"), *rows[-half:]] if left > 0 else list(rows)


def number(value: float | None, form: str) -> str:
    """Return a figure as text; None, such as a hidden share without an exchange, becomes a dash."""
    return "–" if value is None else format(value, form)


def check_folder(folder: Path, option: str = "--checkpoint") -> None:
    """Raise ``ValueError`` if an option's folder cannot be written: otherwise a run's steps would be lost."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise ValueError(f"{option} {folder}: {there} is a file; allowed: a folder, which may be new")
    try:
        TemporaryDirectory(dir=there).cleanup()  # permissions do not say it: root, a read-only disk, /proc
    except OSError:
        raise ValueError(f"{option} {folder}: {there} cannot be written; allowed: a writable folder") from None


def check_files(written: Mapping[str, Path | str | None], read: Iterable[Path] = ()) -> None:
    """Raise ``ValueError`` for files that cannot be made, or are another's: otherwise a run's results would be lost.

    They are named by their options; ``-`` is allowed for ``json`` alone.
    """
    taken = {path.resolve(): str(path) for path in read}
    for name, value in written.items():
        if value is None or (name == "json" and value == "-"):
            continue
        path = Path(value)
        if str(path) == "-":
            raise ValueError(f"--{name} -; allowed: a file (--json alone goes to standard output)")
        faults = {"its folder does not exist": not path.parent.is_dir(), "it is a folder": path.is_dir()}
        faults["it cannot be written"] = not os.access(path if path.exists() else path.parent, os.W_OK)
        if why := next((fault for fault, so in faults.items() if so), ""):
            allowed = "a file in a folder that can be written" + (", or -" if name == "json" else "")
            raise ValueError(f"--{name} {path}: {why}; allowed: {allowed}")
        if (of := taken.get(path.resolve())) is not None:
            raise ValueError(f"--{name} {path} is the file of {of}; allowed: another file for each")
        taken[path.resolve()] = f"--{name} {path}"


@contextmanager
def refused(option: str, path: Path | str) -> Iterator[None]:
    """Turn an ``OSError`` into a ``ValueError`` that names the option and its file or folder."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"--{option} {path}: {error.strerror or error}; allowed: a place that can be written"
        ) from error


@contextmanager
def writing(option: str, path: Path, screen: Console | None = None) -> Iterator[Path]:
    """Yield a file beside ``path``, which becomes ``path`` when it is whole: a full disk leaves no part of it.

    The screen, if given, is told so. A pipe or a device is written as it is.
    """
    with refused(option, path):
        if path.exists() and not path.is_file():
            yield path
            return
        unfinished = path.with_name(f".{path.name}.unfinished")
        try:
            yield unfinished
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    if screen is not None:
        print_lines(screen, f"written: {path}")


def write_json(target: str | None, content: dict[str, Any]) -> None:
    """Write ``content`` as JSON to a file, to standard output for ``-``, or nowhere for None."""
    text = json.dumps(content, indent=2) + "\n"
    if target == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
    elif target is not None:
        with writing("json", Path(target)) as file:
            file.write_text(text)


EVERY_S = 10.0  # seconds between two lines where there is no terminal
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
