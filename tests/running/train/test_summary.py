"""The summary of a training."""

from __future__ import annotations

from overlap1f1b.running.train.summary import marks


def test_marks() -> None:
    assert marks(100, 4) == [0, 33, 66, 99]
    assert marks(3) == [0, 1, 2]
    assert marks(1) == [0]
    assert marks(0) == []
