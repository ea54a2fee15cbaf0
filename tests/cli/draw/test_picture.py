"""Timelines as files."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.cli.plan.run import plan

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe", "zb_v"])
def test_svg(capsys: Capture, tmp_path: Path, schedule: str) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "plan.svg"
    assert plan(capsys, "--schedule", schedule, "--svg", file).status == 0
    texts = ["".join(node.itertext()).strip() for node in ElementTree.parse(file).iter() if node.tag.endswith("text")]
    assert {"rank 0", "rank 3", "forward"} <= set(texts)
    assert {"1f1b": "F7", "dualpipe": "3'F4", "zb_v": "7F0"}[schedule] in texts
    first = file.read_bytes()
    plan(capsys, "--schedule", schedule, "--svg", file)
    assert file.read_bytes() == first


def test_png(capsys: Capture, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    file = tmp_path / "plan.png"
    assert plan(capsys, "--png", file, "--ranks", 3).status == 0
    with image.open(file) as picture:
        picture.verify()
        assert picture.format == "PNG"
        assert picture.size[0] > picture.size[1] > 100


def test_large_programs_are_drawn_without_texts(capsys: Capture, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "plan.svg"
    assert plan(capsys, "--ranks", 16, "--microbatches", 100, "--schedule", "1f1b", "--svg", file).status == 0
    assert "F50" not in file.read_text()


def test_without_matplotlib(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = plan(capsys, "--png", tmp_path / "plan.png")
    assert result.status == 2
    assert result.err == "overlap1f1b: error: --png needs matplotlib; pip install 'overlap1f1b[plot]'\n"
