"""A rank that raises, dies or stops: all others end within the limit, and say which rank, at which node, and why."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor, nn

from overlap1f1b.engine import Engine
from tests import models
from tests.device.standin import Stopped, World, here
from tests.device.steps import Layout, batch_of, mesh_of, model_of, program_of
from tests.ranks import Ranks

LAYOUT, FAILING, LIMIT_S = Layout(2, 2), 2, 3.0
PHASES = {"the construction": None, "the first step": 0, "the measured step": 1, "a planned step": 2}
SOON = {"watchdog.LOOK_S": 0.05, "lanes.LOOK_S": 0.05, "failures.ROLL_CALL_S": 0.5, "failures.GRACE_S": 0.2}


class Failing(nn.Module):
    """A block that fails in a call of its forward."""

    def __init__(self, inner: nn.Module, call: int, fail: Callable[[], None]) -> None:
        super().__init__()
        self.inner, self.left, self.fail = inner, call, fail

    def forward(self, *x: Tensor) -> Any:
        self.left -= 1
        if self.left < 0:
            self.fail()
        return self.inner(*x)


class Waiting(nn.Module):
    """A block whose host waits in every forward until its device has done all its work, as in ``tensor.item()``."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *x: Tensor) -> Any:
        while here().compute.hung:
            time.sleep(0.01)
        return self.inner(*x)


class Case:
    """What happens to one rank, and when all others have ended."""

    def __init__(self, how: str, phase: str, waits: bool) -> None:
        self.how, self.phase, self.waits = how, phase, waits
        self.ended = threading.Barrier(LAYOUT.size)

    def fail(self, engine: list[Engine]) -> None:
        if self.how == "raises":
            raise ValueError("bad weather")
        if self.how == "dies" and engine:  # its connections close, and it leaves no word
            engine[0].mesh.abort()
        here().world.lose(FAILING)
        self.ended.wait(60)
        raise Stopped

    def play(self, rank: int, size: int) -> tuple[str, float]:
        """Return this rank's error, and the seconds that it took from the failure on."""
        program = program_of("combined_1f1b", 2)
        mesh, engine = mesh_of(LAYOUT), list[Engine]()
        model = model_of(LAYOUT, mesh)
        inputs, target = batch_of(program, LAYOUT, rank)
        step = PHASES[self.phase]
        blocks = list(model)
        if rank == FAILING and step is not None:  # the last stage is here
            blocks[-1] = Failing(blocks[-1], step * program.microbatches + 1, lambda: self.fail(engine))
        elif self.waits:
            blocks = [Waiting(block) for block in blocks]
        start, error = time.monotonic(), ""
        try:
            if rank == FAILING and step is None:
                self.fail(engine)
            engine.append(Engine(blocks, program, mesh=mesh, loss_fn=models.loss_fn, overlap=3, timeout=LIMIT_S))
            for _ in range(4):
                start = time.monotonic()
                engine[0].step(inputs, target=target)
        except Stopped:
            return "stopped", 0.0
        except Exception as caught:
            error = "\n".join([f"{type(caught).__name__}: {caught}", *getattr(caught, "__notes__", ())])
        took = time.monotonic() - start
        if engine:
            engine[0].close()
        if not (rank == FAILING and self.how == "raises"):
            self.ended.wait(60) if self.how != "raises" else None
        return error, took


def _ends(rank: int, size: int, how: str, phase: str, waits: bool) -> list[tuple[str, float]]:
    world = World(LAYOUT.size)
    with ExitStack() as stack:
        for name, seconds in SOON.items():
            stack.enter_context(patch(f"overlap1f1b.transport.{name}", seconds))
        return world.run(Case(how, phase, waits).play)


@pytest.mark.parametrize(
    ("how", "phase", "waits"),
    [
        *(("raises", phase, False) for phase in PHASES),
        ("raises", "the first step", True),
        ("raises", "a planned step", True),
        ("stops", "the first step", False),
        ("stops", "the first step", True),
        ("stops", "a planned step", False),
        ("dies", "the measured step", False),
        ("dies", "a planned step", False),
        ("dies", "a planned step", True),
    ],
)
def test_all_others_end_and_say_why(alone: Ranks, how: str, phase: str, waits: bool) -> None:
    (found,) = alone.run(_ends, how, phase, waits)
    for rank, (said, took) in enumerate(found):
        if rank == FAILING:
            assert said.startswith("ValueError: bad weather" if how == "raises" else "stopped"), said
            continue
        assert said.startswith("LostRankError"), said
        assert "rank pp 1, ep 0" in said, said  # who
        if phase != "the construction":
            assert "bad weather" in said or how != "raises", said  # why
            assert ".f[" in said or ".b[" in said, said  # where
        assert took < 3 * LIMIT_S
