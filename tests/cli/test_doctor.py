"""`overlap1f1b doctor` as a user runs it, on machines with faults, each planted from outside."""

from __future__ import annotations

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

from overlap1f1b.cli.doctor import GREENLET, TRITON, Finding, connections
from overlap1f1b.cli.main import main
from overlap1f1b.transport.versions import TORCH
from tests.cli.inside import Verb
from tests.cli.lasting import lasting
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
    expected = ["torch", "greenlet", "cuda", "nccl", "triton", "connections", "streams", "link between ranks"]
    assert list(found) == [*expected, "shaped wire"]
    assert found["torch"] == {"name": "torch", "status": "ok", "value": version("torch"), "advice": ""}
    assert " Gbit/s each way" in found["link between ranks"]["value"]
    assert found["link between ranks"]["status"] in ("ok", "warn")

    for name, planted in (("greenlet", "9.9"), ("torch", "2.10.0")):  # found before those of the real ones
        information = tmp_path / f"{name}-{planted}.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {planted}\n")
    (tmp_path / "tc").write_text("#!/bin/sh\nprintf 'Error: Unknown qdisc.\\n' >&2\nexit 2\n")
    (tmp_path / "tc").chmod(0o755)
    planted_in = {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
        "PATH": os.pathsep.join([str(tmp_path), os.environ["PATH"]]),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "GLOO_SOCKET_IFNAME": "nowhere0",  # no rank finds the other
    }
    command, environ = [*COMMAND, "doctor", "--json", "-"], os.environ | planted_in
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    found = findings_of(done.stdout, done.stderr)
    assert found["greenlet"] == {
        "name": "greenlet",
        "status": "warn",
        "value": "9.9, tested from 3.1 to before 4",
        "advice": "install greenlet>=3.1,<4",
    }
    assert found["torch"]["status"] == "fail"
    assert found["torch"]["advice"] == f"install torch>={TORCH[0]},<{TORCH[1]}"
    assert found["connections"]["status"] == ("fail" if torch.cuda.is_available() else "warn")
    assert found["connections"]["advice"].startswith("unset CUDA_DEVICE_MAX_CONNECTIONS")
    assert found["link between ranks"]["status"] == "fail"
    assert "GLOO_SOCKET_IFNAME" in found["link between ranks"]["advice"]  # torch 2.15 does not name the interface
    assert found["shaped wire"]["status"] == "warn"
    if os.geteuid() == 0:
        assert "Unknown qdisc" in found["shaped wire"]["value"]


def test_a_limit_that_is_too_short_is_named_first() -> None:
    found = findings_of(*Fork(["doctor", "--json", "-", "--timeout", "0.001"], os.environ).wait()[1:])[
        "link between ranks"
    ]
    assert found["status"] == "fail"
    assert re.search("timed? ?out|by peer|broken pipe", found["value"], re.IGNORECASE)  # whichever rank is first
    assert "/" not in found["value"]
    assert found["advice"].startswith("allow more than --timeout 0.001; unset GLOO_SOCKET_IFNAME or ")


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
        assert process.stdout is not None
        assert (process.stdout.read().strip(), process.wait(30)) == ("", 130)


@pytest.mark.parametrize(
    ("value", "gpu", "status"),
    [
        (None, True, "ok"),
        ("1", True, "fail"),
        ("1", False, "warn"),
        ("8", True, "ok"),
        ("0", True, "warn"),
        ("eight", True, "warn"),
    ],
)
def test_connections(value: str | None, gpu: bool, status: str) -> None:
    environ = {} if value is None else {"CUDA_DEVICE_MAX_CONNECTIONS": value}
    assert connections(environ, gpu=gpu).status == status


def test_what_is_tested_is_what_can_be_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    first, beyond = TORCH
    assert f"torch>={first},<{beyond}" in project["dependencies"]
    assert f"greenlet>={GREENLET[0]}" in project["dependencies"]
    first, beyond = TRITON
    assert any(one.startswith(f"triton>={first},<{beyond};") for one in project["optional-dependencies"]["test"])


def test_options(capsys: pytest.CaptureFixture[str]) -> None:
    error = Verb("doctor").refused(capsys, "--timeout", 0)
    assert error == "--timeout 0; allowed: more than 0, at most 1000000"


def test_checks_that_last_say_how_far_they_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Finding("planted", "ok", "")
    monkeypatch.setattr("overlap1f1b.cli.doctor.link", lambda _: found)
    monkeypatch.setattr("overlap1f1b.cli.doctor.wire", lambda: found)
    for name in ("link", "wire"):
        lasting(monkeypatch, f"overlap1f1b.cli.doctor:{name}")
    assert main(["doctor", "--timeout", "7"]) == 0
    said = re.findall(r"^\d:\d\d (.*)$", capsys.readouterr().out, re.M)
    expected = ["3 of 5 checks done, now link between ranks, at most 7 s", "4 of 5 checks done, now shaped wire"]
    assert [line for line in dict.fromkeys(said) if line[0] in "34"] == expected
