"""The drop-in for DualPipe on the stand-in, with modules that overlap pairs by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest

from tests.device.standin import World
from tests.device.steps import one_at_a_time, stuck
from tests.integrations import test_dualpipe as dualpipe
from tests.ranks import Ranks


@contextmanager
def _locked() -> Iterator[None]:
    stages_of = dualpipe.stages_of

    def locked(*args: Any) -> Any:
        with one_at_a_time:  # seeds are of the process
            return stages_of(*args)

    with patch.object(dualpipe, "stages_of", locked):
        yield


def _steps(rank: int, size: int, name: str, kind: str) -> list[str]:
    case = dualpipe.Case(name, kind, size, 1, None)
    return [problem for keep in (False, True) for problem in case.train(keep=keep)]


def _plays(rank: int, size: int, name: str, kind: str, pp: int) -> tuple[list[list[str]], list[str]]:
    world = World(pp)
    with dualpipe.double(), _locked():
        problems = world.run(_steps, name, kind)
    return problems, [f"{setting}: {waits}" for setting, waits in stuck(world.logs)]


@pytest.mark.parametrize(("name", "kind", "pp"), [("dualpipe", "own", 4), ("dualpipev", "mixed", 2)])
def test_whole_modules_play(alone: Ranks, name: str, kind: str, pp: int) -> None:
    ((problems, hanging),) = alone.run(_plays, name, kind, pp)
    assert problems == [[]] * pp
    assert not hanging
