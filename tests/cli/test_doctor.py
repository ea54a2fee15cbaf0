"""`overlap1f1b doctor` as a user runs it, on machines with faults, each planted from outside."""

import json
import os
import re
import signal
import subprocess
import time
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from overlap1f1b.cli.doctor import SERIAL, TESTED
from overlap1f1b.transport.versions import TORCH
from tests.cli.inside import Verb
from tests.running.fork import Fork
from tests.running.run import COMMAND, ROOT


def findings_of(out: str, err: str) -> dict[str, dict[str, str]]:
    """By name."""
    assert "Traceback" not in err, err
    findings: list[dict[str, Any]] = json.loads(out)["findings"]
    assert all(list(found) == ["name", "status", "value", "advice"] for found in findings)
    assert all(found["status"] == "ok" or found["advice"] for found in findings), "what is wrong has an advice"
    assert all(f"{found['status']}" in err and found["name"] in err for found in findings)
    return {found["name"]: found for found in findings}


def test_what_is_measured_and_every_planted_fault_is_found(tmp_path: Path) -> None:
    """The faults in a process that starts as a user starts it, since they are planted in its environment."""
    found = findings_of(*Fork(["doctor", "--json", "-"], os.environ).wait()[1:])
    assert list(found) == ["torch", "greenlet", "triton", "cuda", *SERIAL, "link between ranks", "processors"]
    assert found["torch"] == {"name": "torch", "status": "ok", "value": version("torch"), "advice": ""}
    assert " Gbit/s each way" in found["link between ranks"]["value"]
    assert found["link between ranks"]["status"] in ("ok", "warn")
    assert re.fullmatch(r"a rank waits for one in \d+% of the time", found["processors"]["value"])

    for name, planted in (("greenlet", "9.9"), ("torch", "2.10.0")):  # found before those of the real ones
        information = tmp_path / f"{name}-{planted}.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {planted}\n")
    planted_in = {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
        **dict.fromkeys(SERIAL.values(), "1"),
        "GLOO_SOCKET_IFNAME": "nowhere0",  # no rank finds the other
    }
    command, environ = [*COMMAND, "doctor", "--json", "-"], os.environ | planted_in
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    found = findings_of(done.stdout, done.stderr)
    assert found["greenlet"] == {
        "name": "greenlet",
        "status": "warn",
        "value": "9.9",
        "advice": "install greenlet>=3.1,<4",
    }
    assert found["torch"]["status"] == "fail"
    assert found["torch"]["advice"] == f"install torch>={TORCH[0]},<{TORCH[1]}"
    for name, variable in SERIAL.items():
        assert found[name]["status"] == ("fail" if torch.cuda.is_available() else "warn")
        assert found[name]["advice"].startswith(f"unset {variable}")
    assert found["link between ranks"]["status"] == "fail"
    assert "GLOO_SOCKET_IFNAME" in found["link between ranks"]["advice"]  # torch 2.15 does not name the interface


def test_a_limit_that_is_too_short_is_named_first() -> None:
    found = findings_of(*Fork(["doctor", "--json", "-", "--timeout", "0.001"], os.environ).wait()[1:])[
        "link between ranks"
    ]
    assert found["status"] == "fail"
    assert re.search("timed? ?out|by peer|broken pipe", found["value"], re.IGNORECASE)  # whichever rank is first
    assert "/" not in found["value"]
    assert found["advice"].startswith("allow more than --timeout 0.001, or name an interface ")


def test_ctrl_c_is_no_fault_of_the_link() -> None:
    """A terminal sends it to all processes; here while the ranks import torch."""
    process = subprocess.Popen(
        [*COMMAND, "doctor"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    with process:
        while sum(rank.memory_info().rss > 50e6 for rank in psutil.Process(process.pid).children()) < 2:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        assert (process.stdout.read().strip(), process.wait(30)) == ("", 130)


def test_what_is_tested_is_what_can_be_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    first, beyond = TORCH
    assert f"torch>={first},<{beyond}" in project["dependencies"]
    assert f"greenlet>={TESTED['greenlet'][0]}" in project["dependencies"]
    first, beyond = TESTED["triton"]
    assert any(one.startswith(f"triton>={first},<{beyond};") for one in project["optional-dependencies"]["test"])


def test_options(capsys: pytest.CaptureFixture[str]) -> None:
    error = Verb("doctor").refused(capsys, "--timeout", 0)
    assert error == "--timeout 0; allowed: more than 0, at most 1000000"
