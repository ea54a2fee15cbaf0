"""Timelines drawn in text and as files."""

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from overlap1f1b.cli.draw import Cell, Grid, Track, tracks_of
from overlap1f1b.schedule import build_schedule
from overlap1f1b.simulation import Costs, simulate
from tests.cli.inside import plan
from tests.tiers import wide

Capture = pytest.CaptureFixture[str]


def grid(name: str, width: int = 120, **options: int) -> Grid:
    return Grid.of(tracks_of(simulate(build_schedule(name, **options), Costs())), width=width)


def lines_of(drawn: Grid) -> list[str]:
    return ["".join(text for text, _ in line).rstrip() for line in drawn.lines]


def test_a_known_picture() -> None:
    drawn = grid("1f1b", ranks=3, microbatches=4)
    assert drawn.until is None
    assert lines_of(drawn) == [
        "rank 0 F0-F1-F2-            B0----F3-B1----   B2----   B3----",
        "rank 1    F0-F1-      B0----F2-B1----F3-B2----   B3----",
        "rank 2       F0-B0----F1-B1----F2-B2----F3-B3----",
        "time   |0    |2    |4    |6    |8    |10   |12   |14   |16   |18",
    ]


def test_pairs_and_stages_are_named() -> None:
    assert lines_of(grid("combined_1f1b", ranks=1, microbatches=3))[0] == "rank 0 F0-F1-B0‖F2----B1----B2----"
    lines = lines_of(grid("zb_v", ranks=1, microbatches=1))
    assert lines[0] == "rank 0 0F0-1F0-1I0-1W0-0I0-0W0-"
    assert lines_of(grid("dualpipe", ranks=2, microbatches=4))[1].startswith("rank 1 0'F2-1F0--0'F3-1B0-------")


@pytest.mark.parametrize("width", [20, 41])
def test_what_does_not_fit_is_cut_and_said(width: int) -> None:
    whole, cut = grid("1f1b", ranks=2, microbatches=16, width=1000), grid("1f1b", ranks=2, microbatches=16, width=width)
    assert whole.until is None
    assert cut.until == pytest.approx((width - 7) / 4)  # F10- has four columns for one unit
    for long, short in zip(lines_of(whole)[:2], lines_of(cut)[:2], strict=True):
        assert len(short) <= width
        assert long.startswith(short)


@pytest.mark.parametrize("name", ["afab", "1f1b", "combined_1f1b", "zb_h1", "zb_h2", "dualpipe"])
def test_cells_have_the_columns_of_their_times(name: str) -> None:
    timeline = simulate(build_schedule(name, ranks=4, microbatches=8), Costs())
    drawn = Grid.of(tracks_of(timeline), width=10_000)
    for rank, spans in enumerate(timeline.ranks):
        pieces = [text for text, style in drawn.lines[rank][1:] if style]
        assert len(pieces) == len(spans)
        scales = {len(piece) / (span.end - span.start) for piece, span in zip(pieces, spans, strict=True)}
        assert len(scales) == 1
        line = "".join(text for text, _ in drawn.lines[rank])
        assert line.count(" ") - len("rank 0 ") + 5 == pytest.approx(
            scales.pop() * spans[-1].end - sum(map(len, pieces))
        )


def test_styles_are_the_kinds() -> None:
    pieces = [p for line in grid("zb_h1", ranks=2, microbatches=2).lines for p in line if p[1] not in ("", "axis")]
    assert {(text[0], style) for text, style in pieces} == {("F", "F"), ("I", "I"), ("W", "W")}
    assert {style for line in grid("combined_1f1b", ranks=1, microbatches=3).lines for _, style in line} == {
        *("", "F", "pair", "B", "axis")
    }


def test_short_cells_do_not_stretch_the_picture() -> None:
    track = Track("rank 0", [Cell("F0", 0, 1, "F"), Cell("W0", 1, 1.001, "W"), Cell("B0", 2, 3, "B")])
    assert lines_of(Grid.of([track], width=100))[0] == "rank 0 F0-   B0-"


def test_nothing_to_draw() -> None:
    assert lines_of(Grid.of([Track("rank 0", [])], width=30)) == ["rank 0", "time   |0"]


@pytest.mark.parametrize("unit", [1e-300, 1e-9, 0.03, 1, 7e5, 2e14, 1e90])
def test_the_axis_has_round_marks_whatever_the_unit(unit: float) -> None:
    track = Track("rank 0", [Cell(f"F{m}", m * unit, (m + 1) * unit, "F") for m in range(10)])
    drawn = Grid.of([track], width=120)
    axis = lines_of(drawn)[-1].removeprefix("time   ")
    marks = [float(mark) for mark in axis.split("|")[1:]]
    assert 2 <= len(marks) <= 11
    assert marks[0] == 0
    assert f"{marks[1]:.0e}"[0] in "125"
    assert marks == pytest.approx([index * marks[1] for index in range(len(marks))])
    assert marks[-1] <= 10 * unit * (1 + 1e-9)


def test_costs_that_lie_far_apart() -> None:
    cells = [Cell("F0", 0, 1e90, "F"), Cell("B0", 1e90, 1e90 + 1e-300, "B"), Cell("F1", 1e90, 2e90, "F")]
    assert lines_of(Grid.of([Track("rank 0", cells)], width=40))[0] == "rank 0 F0-F1-"


@pytest.mark.parametrize("schedule", ["1f1b", *wide("dualpipe", "zb_v")])
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
    expected = "--png needs matplotlib; pip install matplotlib"
    assert plan.refused(capsys, "--png", tmp_path / "plan.png") == expected
