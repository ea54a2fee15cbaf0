"""Every benchmark that no other test runs goes through in a tiny size: else a name that changes breaks it unseen."""

import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from overlap1f1b.running.transformer import MoEConfig
from overlap1f1b.schedule import Placement

FOLDER = Path(__file__).parents[1] / "benchmarks"
TINY: dict[str, tuple[str, dict[str, Any]]] = {  # options, and constants of the script
    "engine_walk": ("--microbatches 4 --rounds 1", {}),
    "launch_cost": ("", {"SIZES": ((1, 1, 2, 4, 3),)}),
    "limits": (
        "",
        {
            "LIMITS": (1.3,),
            "MICROBATCHES": (2,),
            "SIZES": {"tiny": MoEConfig(layers=1, hidden=16, intermediate=16, sequence=32)},
        },
    ),
    "ranges_cost": ("--layers 1 --hidden 16 --sequence 16 --rounds 1", {}),
    "schedule_scale": ("", {"MICROBATCHES": (8,)}),
    "synthesis": ("", {"ROWS": ((Placement.loop(2, 1), 4, 3.0, 1.0, 1, 0.1),)}),
}


@pytest.mark.wide
@pytest.mark.parametrize("name", TINY)
def test_a_benchmark_runs(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    spec = spec_from_file_location(name, FOLDER / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    options, constants = TINY[name]
    for constant, value in constants.items():
        monkeypatch.setattr(module, constant, value)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *options.split()])
    module.main()
    assert capsys.readouterr().out


@pytest.mark.wide
@pytest.mark.parametrize("command", ["drift.py --cost 1", "orders.py --steps 12 14"])
def test_a_benchmark_runs_in_processes_of_its_own(command: str) -> None:
    """Its ranks, or random numbers that no seed of the tests may reach."""
    script, *options = command.split()
    result = subprocess.run(
        [sys.executable, str(FOLDER / script), *options], capture_output=True, text=True, timeout=280, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout
