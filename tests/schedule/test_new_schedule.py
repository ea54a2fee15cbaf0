"""A new schedule is two files: its generator, and a line in the registry."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import overlap1f1b

GENERATOR = '''
from dataclasses import dataclass

from overlap1f1b.schedule.action import Action, Kind
from overlap1f1b.schedule.generators.options import Schedule
from overlap1f1b.schedule.placement import Placement
from overlap1f1b.schedule.program import Program, program_of


@dataclass(frozen=True)
class TurnedAfab(Schedule):
    """All forwards, then all backwards, every ``turn``-th microbatch of the backwards last."""

    chunks: int = 1
    turn: int = 1

    def program(self, microbatches: int, ranks: int) -> Program:
        placement = Placement.loop(ranks, self.chunks)
        backwards = sorted(range(microbatches), key=lambda m: (m % self.turn, -m))
        rows = [
            [Action(Kind.F, stage, m) for _, stage in placement.places(rank) for m in range(microbatches)]
            + [Action(Kind.B, stage, m) for _, stage in placement.places(rank)[::-1] for m in backwards]
            for rank in range(ranks)
        ]
        return program_of("turned_afab", microbatches, placement, rows)
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


def test_a_new_schedule_touches_two_files(tmp_path: Path) -> None:
    """With an option of its own it is built, simulated, searched and refused as the others are, in a copy."""
    package = tmp_path / "overlap1f1b"
    shutil.copytree(Path(overlap1f1b.__file__).parent, package, ignore=shutil.ignore_patterns("kernels", "__pycache__"))
    generators = package / "schedule" / "generators"
    (generators / "turned.py").write_text(GENERATOR)
    registry = generators / "registry.py"
    text = registry.read_text()
    before = "from overlap1f1b.schedule.generators.two_stages"
    text = text.replace(before, f"from overlap1f1b.schedule.generators.turned import TurnedAfab\n{before}")
    line = '        "zb_h1": ZBH1,\n'
    assert text.count(before) == text.count(line) == 1
    registry.write_text(text.replace(line, f'{line}        "turned_afab": TurnedAfab,\n'))

    asked = (
        "--schedule turned_afab --chunks 2 --json out.json --compare turned_afab:turn=2",
        "--schedule turned_afab --extra-warmup 1",
        "--compare 1f1b:turn=2",
        "--search --schedule turned_afab",
    )
    command = [sys.executable, "-c", PLAN, *asked]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    rows = json.loads((tmp_path / "out.json").read_text())["compare"]
    assert [(row["schedule"], row["chunks"], row["turn"]) for row in rows] == [
        ("turned_afab", 2, None),
        ("turned_afab", 1, 2),
    ]
    assert "--extra-warmup 1 with turned_afab; allowed: 0" in ended.stderr
    assert "turn=2 with 1f1b; allowed: extra_warmup (turn is an option of turned_afab)" in ended.stderr
    searched = ended.stdout.split(f"{asked[-1]}\n")[1]
    assert searched.splitlines()[1].startswith("turned_afab")
