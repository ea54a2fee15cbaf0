"""A new schedule is two files: its generator, and a line in the registry."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import overlap1f1b

GENERATOR = '''
from overlap1f1b.schedule.action import Action, Kind
from overlap1f1b.schedule.placement import Placement
from overlap1f1b.schedule.program import Program, program_of


def reversed_afab(microbatches: int, ranks: int = 1, chunks: int = 1) -> Program:
    """All forwards, then all backwards, the last microbatch first."""
    placement = Placement.loop(ranks, chunks)
    rows = [
        [Action(Kind.F, stage, m) for _, stage in placement.places(rank) for m in range(microbatches)]
        + [Action(Kind.B, stage, m) for _, stage in placement.places(rank)[::-1] for m in reversed(range(microbatches))]
        for rank in range(ranks)
    ]
    return program_of("reversed_afab", microbatches, placement, rows)
'''


def test_a_new_schedule_touches_two_files(tmp_path: Path) -> None:
    """It is built, checked, simulated, searched and refused as the others are, in a copy of the package."""
    package = tmp_path / "overlap1f1b"
    shutil.copytree(Path(overlap1f1b.__file__).parent, package, ignore=shutil.ignore_patterns("kernels", "__pycache__"))
    generators = package / "schedule" / "generators"
    (generators / "reversed.py").write_text(GENERATOR)
    registry = generators / "build.py"
    text = registry.read_text()
    before = "from overlap1f1b.schedule.generators.two_stages"
    text = text.replace(before, f"from overlap1f1b.schedule.generators.reversed import reversed_afab\n{before}")
    line = '        "zb_h1": Schedule(zb_h1),\n'
    assert text.count(before) == text.count(line) == 1
    registry.write_text(text.replace(line, f'{line}        "reversed_afab": Schedule(reversed_afab),\n'))

    def plan(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "overlap1f1b", "plan", "--microbatches", 4, "--ranks", 2, *arguments]
        return subprocess.run([*map(str, command)], cwd=tmp_path, capture_output=True, text=True, check=False)

    played = plan("--schedule", "reversed_afab", "--chunks", 2, "--json", "out.json", "--compare", "1f1b")
    assert not played.returncode, played.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert [row["schedule"] for row in result["compare"]] == ["reversed_afab", "1f1b"]
    refused = plan("--schedule", "reversed_afab", "--extra-warmup", 1)
    assert "with reversed_afab; allowed: 0" in refused.stderr
    searched = plan("--search", "--schedule", "reversed_afab")
    assert searched.stdout.splitlines()[1].startswith("reversed_afab")
