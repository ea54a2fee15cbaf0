"""Schedules by their names: their pictures, every refusal with its numbers, and what a new one touches."""

import json
import re
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import overlap1f1b
from overlap1f1b.schedule import build_schedule
from overlap1f1b.schedule.generators.registry import BY_NAME

ROW = re.compile(r"^ *rank \d+: (.*)$", re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "microbatches", "ranks", "options"),
    [
        ("afab", 4, 2, {}),
        ("1f1b", 6, 4, {}),
        ("interleaved_1f1b", 4, 2, {"chunks": 2}),
        ("combined_1f1b", 6, 3, {"extra_warmup": 0}),
        ("zb_h1", 5, 3, {}),
        ("zb_h2", 7, 3, {}),
        ("zb_v", 4, 2, {}),
        ("dualpipe", 4, 2, {}),
        ("dualpipev", 4, 2, {}),
    ],
)
def test_pictures_in_docstrings(name: str, microbatches: int, ranks: int, options: dict[str, int]) -> None:
    program = build_schedule(name, ranks=ranks, microbatches=microbatches, **options)  # type: ignore[arg-type]
    drawn = ROW.findall(BY_NAME[name].__doc__ or "")
    rows = ROW.findall(program.draw())
    if max(len(program.placement.places(rank)) for rank in range(ranks)) == 1:
        rows = [re.sub(r"\d+'*(?=[FBIW])", "", row) for row in rows]
    assert [" ".join(row.split()) for row in drawn] == rows


def test_every_size_that_is_allowed_passes_its_checks() -> None:
    chunked = product(("sequential", "afab", "interleaved_1f1b", "combined_1f1b", "zb_h1"), (1, 2, 3))
    names = [*chunked, ("1f1b", None), ("zb_h2", None), ("zb_v", None)]
    for (name, chunks), ranks, microbatches in product(names, (1, 2, 3, 5), (1, 2, 3, 5, 7, 8, 11)):
        build_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks).check()


def test_defaults_may_be_given() -> None:
    assert build_schedule("DualPipeV", ranks=2, microbatches=4, chunks=2).name == "dualpipev"
    assert build_schedule("sequential", microbatches=4, extra_warmup=0).name == "sequential"


@pytest.mark.parametrize(
    ("name", "microbatches", "ranks", "options", "message"),
    [
        ("dualpip", 4, 1, {}, "unknown schedule 'dualpip'; allowed: .*; nearest: dualpipe"),
        ("zigzag", 4, 1, {}, "unknown schedule 'zigzag'; allowed: sequential, combined_1f1b"),
        ("combined_1f1b", 4, 0, {}, "ranks=0; allowed: 1 or more"),
        ("combined_1f1b", 0, 1, {}, "microbatches=0; allowed: 1 or more"),
        (
            "zb_v",
            10**9,
            2,
            {},
            "^zb_v with ranks=2, microbatches=1000000000, chunks=2 has about 8000000000 actions; al",
        ),
        ("1f1b", 4, 10**9, {}, "has about 8000000000 actions; allowed: at most 5000000$"),
        ("sequential", 4, 1, {"chunks": 10**9}, "has about 8000000000 actions; allowed: at most 5000000$"),
        ("1f1b", 2.5, 1, {}, "^microbatches=2.5; allowed: a whole number, 1 or more$"),
        ("1f1b", 2, "2", {}, "^ranks='2'; allowed: a whole number, 1 or more$"),
        ("zb_h2", 4, 1, {"chunks": 2}, r"chunks=2 with zb_h2; allowed: 1 \(chunks is an option of sequential, "),
        ("zb_v", 4, 1, {"chunks": 3}, "chunks=3 with zb_v; allowed: 2"),
        ("sequential", 4, 1, {"extra_warmup": 2}, "extra_warmup=2 with sequential; allowed: 0"),
        ("1f1b", 4, 1, {"group_size": 2}, "group_size=2 with 1f1b; allowed: extra_warmup .group_size is an option"),
        (
            "interleaved_1f1b",
            8,
            4,
            {"chunks": 2, "group_size": 3},
            "group_size=3 over 4 ranks with 8 microbatches; allowed: 4 to 8 with a last group of 4 or more, nearest 4",
        ),
        (
            "zb_h1",
            3,
            4,
            {"chunks": 2, "group_size": 9},
            "group_size=9 over 4 ranks with 3 microbatches; allowed: 3, all in one group",
        ),
        ("dualpipe", 8, 3, {}, "dualpipe over 3 ranks; allowed: an even number, nearest 2 or 4"),
        ("dualpipe", 6, 4, {}, "over 4 ranks with 6 microbatches; allowed: an even number from 8 on, nearest 8"),
        ("dualpipe", 9, 4, {}, "9 microbatches; allowed: .* from 8 on, nearest 8 or 10"),
        ("dualpipev", 7, 4, {}, "over 4 ranks with 7 microbatches; allowed: 8 or more"),
    ],
)
def test_refusals_name_the_numbers(
    name: str, microbatches: int, ranks: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_schedule(name, microbatches=microbatches, ranks=ranks, **options)


GENERATOR = '''
from dataclasses import dataclass

from overlap1f1b.schedule.generators.options import Schedule
from overlap1f1b.schedule.generators.sequences import one_by_one
from overlap1f1b.schedule.placement import Placement
from overlap1f1b.schedule.program import Program


@dataclass(frozen=True)
class Mine(Schedule):
    """With an option of its own."""

    chunks: int = 1
    turn: int = 1

    def program(self, microbatches: int, ranks: int) -> Program:
        return one_by_one(microbatches, Placement.loop(ranks, self.chunks))
'''

PLAN = """
import contextlib, sys
from overlap1f1b.cli.main import main

for asked in sys.argv[1:]:
    print(asked)
    with contextlib.suppress(SystemExit):
        main(["plan", "--microbatches", "4", "--ranks", "2", *asked.split()])
"""
"""All that is asked, in one process."""


def test_a_new_schedule_is_its_class_and_a_line(tmp_path: Path) -> None:
    """It is built, simulated, searched and refused as the others are, in a copy of the package."""
    package = tmp_path / "overlap1f1b"
    shutil.copytree(Path(overlap1f1b.__file__).parent, package, ignore=shutil.ignore_patterns("kernels", "__pycache__"))
    (package / "schedule" / "generators" / "mine.py").write_text(GENERATOR)
    registry = package / "schedule" / "generators" / "registry.py"
    text = registry.read_text()
    imports, line = "from overlap1f1b.schedule.program import Program\n", '        "zb_h1": ZBH1,\n'
    assert text.count(imports) == text.count(line) == 1
    text = text.replace(imports, f"from overlap1f1b.schedule.generators.mine import Mine\n{imports}")
    registry.write_text(text.replace(line, f'{line}        "mine": Mine,\n'))
    asked = (
        "--schedule mine --chunks 2 --json out.json --compare mine:turn=2",
        "--schedule mine --extra-warmup 1",
        "--compare 1f1b:turn=2",
        "--search --schedule mine",
    )
    command = [sys.executable, "-c", PLAN, *asked]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    rows = json.loads((tmp_path / "out.json").read_text())["compare"]
    assert [(row["schedule"], row["chunks"], row["turn"]) for row in rows] == [("mine", 2, None), ("mine", 1, 2)]
    assert "--extra-warmup 1 with mine; allowed: 0" in ended.stderr
    assert "turn=2 with 1f1b; allowed: extra_warmup (turn is an option of mine)" in ended.stderr
    assert ended.stdout.split(f"{asked[-1]}\n")[1].splitlines()[1].startswith("mine")
