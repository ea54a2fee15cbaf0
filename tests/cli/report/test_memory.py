"""The picture of memory: what an engine has counted, in its files, in the report and on the page."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b.plan import NodeCosts
from overlap1f1b.profiling import read
from overlap1f1b.record import Profile
from overlap1f1b.running.transformer import MoEConfig, MoETransformer
from overlap1f1b.schedule import build_schedule
from tests.cli.inside import report
from tests.cli.report.test_page import open_page, without_warnings
from tests.engines import make
from tests.observing import Last
from tests.profiling.simulated import simulated, write_run
from tests.ranks import Ranks

Capture = pytest.CaptureFixture[str]


class Peaks(NamedTuple):
    """Bytes of a step: by the plan, as counted in another step of it, and of the rank's parameters."""

    planned: float
    counted: int | None
    parameters: int


class Profiled(NamedTuple):
    """A folder with the files of a run, and its ranks' peaks."""

    folder: Path
    limited: bool
    peaks: list[Peaks]


def _profiled(rank: int, size: int, folder: str, limited: bool) -> Peaks:
    """Write the files of a rank; a limit has the nodes counted in the first steps, without one a later step does it."""
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("pp", "ep"))
    config = MoEConfig(layers=2, hidden=32, intermediate=64, sequence=32, experts=8)
    model = MoETransformer(config, seed=1, group=mesh.get_group("ep"))
    program = build_schedule("combined_1f1b", microbatches=4)
    engine = make(model, program, mesh=mesh, memory="1TB" if limited else None, tries=0, overlap=3, timeout=60)
    inputs, target = torch.randint(256, (2, 16, 32), generator=torch.Generator().manual_seed(1))

    def step() -> int | None:
        for parameter in engine.parameters():
            parameter.grad = None
        return engine.step(inputs, target=target).peak_bytes

    while engine.tuner.settling:
        step()
    step()  # the plan's first is compared with a plain loop
    assert bool(engine.tuner.held) == limited
    if not limited:
        engine.tuner.count_next()
    counted = step()
    (planned,) = engine.plan.peak_bytes or NodeCosts(bytes=engine.tuner.held).peak_bytes(engine.plan.ranks)
    os.environ["KINETO_LOG_LEVEL"] = "6"
    engine.observers.append(Last(keeps_order=True))  # no weight gradient runs early: the plan's own order
    with Profile(engine, folder):
        assert step() is None
    return Peaks(planned, counted, sum(parameter.nbytes for parameter in engine.parameters()))


@pytest.fixture(scope="module", params=[True, pytest.param(False, marks=pytest.mark.wide)])
def profiled(request: pytest.FixtureRequest, ranks2: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    """A real step of two ranks with uneven routing."""
    folder = tmp_path_factory.mktemp("profiled")
    return Profiled(folder, request.param, ranks2.run(_profiled, str(folder), request.param))


def test_the_peak_of_a_step_is_the_plans(capsys: Capture, profiled: Profiled) -> None:
    """Engine, record, trace and report say one peak."""
    folder, limited, peaks = profiled
    found = report.content(capsys, folder)
    for rank, (planned, _, parameters) in zip(found["ranks"], peaks, strict=True):
        assert (rank["peak_bytes"], rank["parameter_bytes"]) == (planned, parameters)
        (recording,) = read(folder / f"rank{rank['rank']}.json").ranks
        assert (recording.source, recording.peak_bytes) == ("records", planned)
    if not limited:  # every rank's plan is made for the one that holds the most
        assert found["ranks"][0]["peak_bytes"] == pytest.approx(max(counted or 0 for _, counted, _ in peaks), rel=0.05)
    assert not {"bytes", "held", "parameters"} & set(found["about"])
    row = ["0", f"{peaks[0].parameters / 1e6:.3f}", f"{peaks[0].planned / 1e6:.3f}"]
    assert row in [line.split() for line in report(capsys, folder).out.splitlines()]


@pytest.mark.parametrize("profiled", [True], indirect=True)
def test_the_picture_has_the_peak_of_the_report(
    capsys: Capture, tmp_path: Path, profiled: Profiled, browser: Any
) -> None:
    folder, _, ((_, _, parameters), _) = profiled
    page = tmp_path / "report.html"
    found = report.content(capsys, folder, "--html", page, "--predicted")
    assert page.stat().st_size < 150_000
    browser.get_log("browser")  # of the pages before
    open_page(browser, page)
    names = browser.execute_script("return [...at('rank').options].map(option => option.value)")
    assert names == ["rank 0", "rank 0 predicted", "rank 1", "rank 1 predicted"]
    for name in names:
        levels, peak = browser.execute_script(
            "at('rank').value = arguments[0]; show(1); draw(); return [memory.levels, memory.peak]", name
        )
        planned = found["ranks"][int(name.split()[1])]["peak_bytes"]
        assert (peak["beyond"], peak["sum"]) == (planned, planned + parameters)
        times = [level["at"] for level in levels]
        assert times == sorted(times)
        for level in levels:
            assert sum(part[1] for part in level["parts"]) == pytest.approx(level["sum"])
        assert sum(part[0].startswith("activations") for part in peak["parts"]) > 1
        last = {part[0]: part[1] for part in levels[-1]["parts"]}
        assert last.pop("gradients") == pytest.approx(parameters, rel=0.1)
        assert last == {"parameters": parameters, "in flight": 0, "working space of a node": 0}
    shown = browser.execute_script("""
        const place = picture.getBoundingClientRect(), left = place.left + x(memory.peak.at + 1e-6, frame.clientWidth);
        picture.dispatchEvent(new PointerEvent("pointermove", {clientX: left, clientY: place.top + 90}));
        const lowest = [...brush.getImageData(LEFT + 5, picture.height - 5, 1, 1).data];
        return [tip.textContent, lowest];
    """)
    assert shown[0].startswith("rank 1 predicted at ")
    assert shown[0].count("\nactivations of microbatch ") > 1
    assert shown[0].endswith(f"parameters: {parameters / 1e3:.4g} kB")
    assert shown[1][:3] == [0x7F, 0x8D, 0x98]  # parameters lie below all
    assert without_warnings(browser)


def test_without_bytes_there_is_no_picture(capsys: Capture, tmp_path: Path, browser: Any) -> None:
    run, page = write_run(tmp_path / "run", simulated("combined_1f1b", 3)), tmp_path / "report.html"
    found = report.content(capsys, run, "--html", page)
    assert {(rank["peak_bytes"], rank["parameter_bytes"]) for rank in found["ranks"]} == {(None, None)}
    assert "Memory" not in report(capsys, run).out
    open_page(browser, page)
    assert not browser.find_element("id", "bytes").is_displayed()
    assert without_warnings(browser)
