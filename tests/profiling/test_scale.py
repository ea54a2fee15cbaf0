"""Large files have exact figures, too; benchmarks/report_scale.py has their time and memory."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from overlap1f1b.profiling import Recording, figures_of, read_file

EVENTS = 10_000


@pytest.fixture(scope="module")
def scale() -> ModuleType:
    """The benchmark, which writes the files."""
    path = Path(__file__).parents[2] / "benchmarks" / "report_scale.py"
    spec = importlib.util.spec_from_file_location("report_scale", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", ["chrome", "nsys"])
def test_every_kernel_counts(tmp_path: Path, scale: ModuleType, kind: str) -> None:
    path = tmp_path / ("trace.json" if kind == "chrome" else "trace.sqlite")
    getattr(scale, f"write_{kind}")(path, EVENTS)
    kernels = int(EVENTS / (4.1 if kind == "chrome" else 2.1))
    assert figures(path) == expected(scale, kernels)


def test_every_span_of_a_record_counts(tmp_path: Path, scale: ModuleType) -> None:
    scale.write_record(tmp_path / "rank0.json", EVENTS)
    assert figures(tmp_path / "rank0.json") == expected(scale, EVENTS)


def figures(path: Path) -> tuple[int, int, int]:
    (recording,) = read_file(path)
    found = figures_of(recording)
    assert isinstance(recording, Recording)
    return found.compute, found.overlap.exchange, found.overlap.exposed


def expected(scale: ModuleType, kernels: int) -> tuple[int, int, int]:
    """Computed a microsecond at a time: compute, exchange, exposed exchange in nanoseconds."""
    busy: dict[int, set[int]] = {scale.COMPUTE: set(), scale.EXCHANGE: set()}
    for launch in scale.launches(kernels):
        start = round(launch.start - scale.STEP_START)
        busy[launch.stream].update(range(start, start + round(scale.KERNEL_US)))
    compute, exchange = busy[scale.COMPUTE], busy[scale.EXCHANGE]
    return 1000 * len(compute), 1000 * len(exchange), 1000 * len(exchange - compute)
