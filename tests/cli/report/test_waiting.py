"""How far a file is read."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from overlap1f1b.cli.report import waiting
from overlap1f1b.cli.report.command import reading
from overlap1f1b.profiling import read
from tests.profiling.synthetic import write_record

SPANS = [("node", "dense.f[0] m0", 0.0, 1.0), ("node", "dense.b[0] m0", 1.0, 2.0)]


@pytest.mark.parametrize("terminal", [False, True])
def test_the_bytes_that_were_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    monkeypatch.setattr(waiting, "EVERY_S", 0.0)
    path = write_record(tmp_path / "rank0.json", [SPANS], seconds=2.0)
    text = io.StringIO()
    with reading(Console(file=text, force_terminal=terminal, width=100)) as progress:
        read(path, progress=progress)
    assert "reading rank0.json" in text.getvalue()
    size = path.stat().st_size / 2**20
    assert terminal or text.getvalue().startswith(f"reading rank0.json: {size:.0f} of {size:.0f} MiB\n")


def test_nothing_is_said_of_what_is_read_at_once(tmp_path: Path) -> None:
    path = write_record(tmp_path / "rank0.json", [SPANS], seconds=2.0)
    text = io.StringIO()
    with reading(Console(file=text)) as progress:
        read(path, progress=progress)
    assert text.getvalue() == ""
