"""What a run has seen so far, beside its checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlap1f1b.cli.train.command import FILE, History


def test_ahead_of_its_checkpoint_it_is_cut(tmp_path: Path) -> None:
    seen = History(0, [3.0, 2.0, 1.0], [0.3, 0.2, 0.1], [(1, 3.5), (3, 1.5)])
    seen.save(tmp_path / "new")
    assert History.load(tmp_path / "new", 3) == seen
    assert History.load(tmp_path / "new", 2) == History(0, [3.0, 2.0], [0.3, 0.2], [(1, 3.5)])


def test_behind_its_checkpoint_it_is_left(tmp_path: Path) -> None:
    History(0, [3.0], [0.3]).save(tmp_path)
    assert History.load(tmp_path, 2) == History(2)


@pytest.mark.parametrize("content", [None, "", "[]", "null", '{"losses": 3}', '{"other": []}', "\x00"])
def test_missing_or_damaged_it_begins_here(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / FILE).write_text(content)
    assert History.load(tmp_path, 7) == History(7)
