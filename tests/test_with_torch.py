"""The releases that ``scripts/with_torch`` takes, and its constraints; it installs nothing here."""

import importlib.util
import sys
import tomllib
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

from tests.tiers import wide

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts/with_torch"
PINS = (ROOT / "constraints.txt").read_text()


@pytest.fixture(scope="module", name="script")
def loaded() -> ModuleType:
    loader = SourceFileLoader("with_torch", str(SCRIPT))
    spec = importlib.util.spec_from_loader("with_torch", loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def pins_of(text: str) -> set[str]:
    return {line for line in text.splitlines() if line and not line.startswith("#")}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["2.10"], "torch 2.10; allowed: 2.11, 2.12, 2.13, 2.14, 2.15, or a patch, such as 2.11.0"),
        *wide(
            (["2.16.0"], "torch 2.16.0; allowed: 2.11, 2.12, 2.13, 2.14, 2.15, or a patch, such as 2.11.0"),
            (["newest"], "torch newest; allowed: 2.11, 2.12, 2.13, 2.14, 2.15, or a patch, such as 2.11.0"),
            (["--python", "nowhere", "2.15"], "--python nowhere does not run; allowed: Python 3.11 or newer"),
            (
                ["--keep", str(ROOT / "docs"), "2.15"],
                f"--keep {ROOT / 'docs'}; allowed: a new folder, or a virtual env",
            ),
            (
                ["--python", sys.executable, "--keep", "THERE", "2.15"],
                f"--python {sys.executable} with --keep THERE, which has ",
            ),
            ([], "the following arguments are required: release"),
        ),
    ],
)
def test_bad_values_are_named_in_one_line(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    (tmp_path / "pyvenv.cfg").touch()  # an environment that is there
    monkeypatch.setattr("sys.argv", ["with_torch", *(word.replace("THERE", str(tmp_path)) for word in arguments)])
    with pytest.raises(SystemExit) as ended:
        script.main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert err.startswith(f"with_torch: error: {message.replace('THERE', str(tmp_path))}")
    assert err.count("\n") == 1


def test_the_torch_of_ci_keeps_all_pins(script: ModuleType) -> None:
    assert script.constraints_for("2.13") == script.constraints_for("2.13.0") == PINS


@pytest.mark.parametrize(("release", "pin"), [("2.15", "torch==2.15.*"), ("2.11.0", "torch==2.11.0")])
def test_another_torch_brings_its_own_triton(script: ModuleType, release: str, pin: str) -> None:
    expected = {line for line in pins_of(PINS) if not line.startswith(("torch==", "triton=="))} | {pin}
    if release == "2.11.0":  # its triton needs an older numpy
        expected = {"numpy<2.4" if line.startswith("numpy==") else line for line in expected}
    assert pins_of(script.constraints_for(release)) == expected


def test_results_are_counted(script: ModuleType, tmp_path: Path) -> None:
    found = '<testsuites><testsuite errors="1" failures="2" skipped="3" tests="10" time="4.2"/></testsuites>'
    (tmp_path / "results.xml").write_text(found)
    assert script.counts(tmp_path / "results.xml") == "4 passed, 3 failed, 3 skipped in 4 s"
    assert script.counts(tmp_path / "none.xml") == "no tests were run"


def test_pins_are_releases_that_the_project_takes() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = (one for extra in project["optional-dependencies"].values() for one in extra)
    wanted = [Requirement(one) for one in (*project["dependencies"], *extras)]
    pins = {Requirement(line).name: Requirement(line) for line in pins_of(PINS)}
    for requirement in wanted:
        if requirement.name == project["name"]:
            continue
        (pin,) = pins[requirement.name].specifier
        assert requirement.specifier.contains(pin.version), f"{requirement} and {pin}"
