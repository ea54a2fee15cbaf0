"""Large files have exact figures, too; benchmarks/report_scale.py has their time and memory."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from overlap1f1b.profiling import figures_of, read_file

EVENTS = 10_000


@pytest.fixture(scope="module")
def scale() -> SimpleNamespace:
    """The benchmark, which writes the files."""
    return SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "report_scale.py")))


def test_every_kernel_counts(tmp_path: Path, scale: SimpleNamespace) -> None:
    files = (("chrome", "trace.json", 4.1), ("nsys", "trace.sqlite", 2.1), ("record", "rank0.json", 1))
    for kind, name, events_of_a_kernel in files:
        getattr(scale, f"write_{kind}")(tmp_path / name, EVENTS)
        (recording,) = read_file(tmp_path / name)
        found = figures_of(recording)
        kernels = int(EVENTS / events_of_a_kernel)
        assert (found.compute, found.overlap.exchange, found.overlap.exposed) == expected(scale, kernels)


def expected(scale: SimpleNamespace, kernels: int) -> tuple[int, int, int]:
    """Computed a microsecond at a time: compute, exchange, exposed exchange in nanoseconds."""
    busy: dict[int, set[int]] = {scale.COMPUTE: set(), scale.EXCHANGE: set()}
    for launch in scale.launches(kernels):
        start = round(launch.start - scale.STEP_START)
        busy[launch.stream].update(range(start, start + round(scale.KERNEL_US)))
    compute, exchange = busy[scale.COMPUTE], busy[scale.EXCHANGE]
    return 1000 * len(compute), 1000 * len(exchange), 1000 * len(exchange - compute)
