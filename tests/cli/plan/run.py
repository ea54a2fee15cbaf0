"""`overlap1f1b plan` inside this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from overlap1f1b.cli.main import main


class Result(NamedTuple):
    status: int
    out: str
    err: str


def plan(capsys: pytest.CaptureFixture[str], *args: object) -> Result:
    """What `overlap1f1b plan` with these arguments returns and writes."""
    capsys.readouterr()
    try:
        status = main(["plan", *map(str, args)])
    except SystemExit as error:
        status = int(error.code or 0)
    return Result(status, *capsys.readouterr())


def content(capsys: pytest.CaptureFixture[str], *args: object) -> dict[str, Any]:
    """Its JSON."""
    result = plan(capsys, *args, "--json", "-")
    assert result.status == 0, result.err
    return json.loads(result.out)


def refused(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """Its one line of error."""
    result = plan(capsys, *args)
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith("overlap1f1b: error: ")
    assert result.err.count("\n") == 1
    assert "Traceback" not in result.err
    return result.err.removeprefix("overlap1f1b: error: ").strip()


ROOT = Path(__file__).parents[3]
