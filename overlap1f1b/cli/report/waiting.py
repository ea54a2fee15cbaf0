"""How far a long file is read: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from overlap1f1b.profiling.reading import Progress as Told

EVERY_S = 10.0


@contextmanager
def reading(screen: Console) -> Iterator[Told]:
    """What to tell the bytes that were read of a file, as long as the block lasts."""
    if not screen.is_terminal:
        yield _Lines(screen)
        return
    columns = (
        TextColumn("reading {task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=screen, transient=True) as bar:
        tasks = {}

        def show(path: Path, read: int, size: int) -> None:
            if path not in tasks:
                tasks[path] = bar.add_task(path.name, total=size)
            bar.update(tasks[path], completed=read)

        yield show


class _Lines:
    """Nothing of what is read at once, a line every ten seconds of what is not."""

    def __init__(self, screen: Console) -> None:
        self.screen, self._next = screen, time.monotonic() + EVERY_S

    def __call__(self, path: Path, read: int, size: int) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + EVERY_S
            text = f"reading {path.name}: {read / 2**20:.0f} of {size / 2**20:.0f} MiB"
            self.screen.print(text, markup=False, highlight=False, soft_wrap=True)
