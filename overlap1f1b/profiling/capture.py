"""What a profiler noted of one process, before kernels are attributed to ranges."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from overlap1f1b.profiling.columns import Columns


@dataclass(eq=False)
class Capture:
    """Events of one process; times in nanoseconds of its clock.

    Args:
        path: The file.
        source: Who wrote it.
        names: Names of ranges, by their index.
        ranges: Columns name, thread, start, end: ranges of our grammar on the host.
        launches: Columns correlation, thread, start: calls that launch kernels and copies.
        kernels: Columns correlation, stream, start, end: what ran on the device.
        rank: As the profiler says; None where it does not. A label of ours comes first.
        world: Number of ranks, likewise.
    """

    path: Path
    source: Literal["torch.profiler", "nsys"]
    names: dict[str, int] = field(default_factory=dict)
    ranges: Columns = field(default_factory=lambda: Columns(4))
    launches: Columns = field(default_factory=lambda: Columns(3))
    kernels: Columns = field(default_factory=lambda: Columns(4))
    rank: int | None = None
    world: int | None = None

    def add_range(self, name: str, thread: int, start: int, end: int) -> None:
        """Notes a range."""
        self.ranges.append((self.names.setdefault(name, len(self.names)), thread, start, end))
