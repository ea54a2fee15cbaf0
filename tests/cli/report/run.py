"""`overlap1f1b report` inside this process."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest

from overlap1f1b.cli.main import main


class Result(NamedTuple):
    status: int
    out: str
    err: str


def report(capsys: pytest.CaptureFixture[str], *args: object) -> Result:
    """What it returns and writes."""
    capsys.readouterr()
    try:
        status = main(["report", *map(str, args)])
    except SystemExit as error:
        status = int(error.code or 0)
    return Result(status, *capsys.readouterr())


def content(capsys: pytest.CaptureFixture[str], *args: object) -> dict[str, Any]:
    """Its JSON."""
    result = report(capsys, *args, "--json", "-")
    assert result.status == 0, result.err
    return json.loads(result.out)


def refused(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """Its one line of error."""
    result = report(capsys, *args)
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith("overlap1f1b: error: ")
    assert result.err.count("\n") == 1
    return result.err.removeprefix("overlap1f1b: error: ").strip()
