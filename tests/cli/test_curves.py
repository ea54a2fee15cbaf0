"""Losses drawn in text."""

from __future__ import annotations

from overlap1f1b.cli.train.summary import marks, sparkline


def test_sparkline() -> None:
    assert sparkline([4, 3, 2, 1]) == "█▆▃▁"
    assert sparkline([2.0, 2.0, 2.0]) == "▁▁▁"
    assert sparkline([]) == ""
    assert sparkline([float(i) for i in range(1000)], width=8) == "▁▂▃▄▅▆▇█"


def test_marks() -> None:
    assert marks(100, 4) == [0, 33, 66, 99]
    assert marks(3) == [0, 1, 2]
    assert marks(1) == [0]
    assert marks(0) == []
