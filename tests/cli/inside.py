"""A verb of `overlap1f1b` inside this process."""

import json
from typing import Any, NamedTuple

import pytest

from overlap1f1b.cli.main import main


class Result(NamedTuple):
    status: int
    out: str
    err: str


class Verb(NamedTuple):
    """`plan(capsys, "--ranks", 4)` is what `overlap1f1b plan --ranks 4` returns and writes."""

    name: str

    def __call__(self, capsys: pytest.CaptureFixture[str], *args: object) -> Result:
        capsys.readouterr()
        try:
            status = main([self.name, *map(str, args)])
        except SystemExit as error:
            status = int(error.code or 0)
        return Result(status, *capsys.readouterr())

    def content(self, capsys: pytest.CaptureFixture[str], *args: object) -> dict[str, Any]:
        """Its JSON."""
        result = self(capsys, *args, "--json", "-")
        assert result.status == 0, result.err
        return json.loads(result.out)

    def refused(self, capsys: pytest.CaptureFixture[str], *args: object) -> str:
        """Its one line of error."""
        result = self(capsys, *args)
        assert (result.status, result.out) == (2, "")
        assert result.err.startswith("overlap1f1b: error: ")
        assert result.err.count("\n") == 1
        assert "Traceback" not in result.err
        return result.err.removeprefix("overlap1f1b: error: ").strip()


plan, report = Verb("plan"), Verb("report")
