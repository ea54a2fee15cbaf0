"""A rank that raises, dies or stops: all others end within the limit, and say which rank, at which node, and why."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b.engine import Engine
from overlap1f1b.schedule import build_schedule
from overlap1f1b.transport import groups
from tests.device.standin import Stopped, World, here
from tests.device.steps import COSTS, Layout, batch_of, mesh_of, model_of, program_of
from tests.engines import make
from tests.ranks import over
from tests.tiers import wide

LAYOUT, FAILING, LIMIT_S = Layout(2, 2), 2, 3.0
MEASURED = "the measured step"
PHASES = {"the construction": None, "the first step": 0, MEASURED: 3, "a planned step": 2}
"""Number of the step. On a device the fourth is measured; the others have costs."""
SOON = {"communicators.LOOK_S": 0.05, "lanes.LOOK_S": 0.05, "failures.ROLL_CALL_S": 0.5, "failures.GRACE_S": 0.2}


@contextmanager
def _soon() -> Iterator[None]:
    with ExitStack() as stack:
        for name, seconds in SOON.items():
            stack.enter_context(patch(f"overlap1f1b.transport.{name}", seconds))
        yield


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
    """A block whose host waits in every forward until its device has done all its work, as in ``tensor.item()``.

    ``waits`` counts those that ended when transfers were aborted. The present one began at ``since``, in seconds.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.waits, self.since = inner, 0, math.inf

    def forward(self, *x: Tensor) -> Any:
        world = here().world
        aborted = len(world.closed)
        self.since = time.monotonic()
        while here().compute.hung:
            time.sleep(0.01)
        self.since = math.inf
        self.waits += len(world.closed) > aborted
        return self.inner(*x)


class Case:
    """What happens to one rank, and when all others have ended."""

    def __init__(self, how: str, phase: str, waits: bool) -> None:
        self.how, self.phase, self.waits = how, phase, waits
        self.ended = threading.Barrier(LAYOUT.size)
        self.waiting = list[Waiting]()

    def fail(self, engine: list[Engine]) -> None:
        if self.waits:  # before the news of the failure, which may find all hosts elsewhere
            here().world.lose(FAILING)
            patience = time.monotonic() + LIMIT_S / 2
            while not any(time.monotonic() - one.since > 0.1 for one in self.waiting):
                assert time.monotonic() < patience, "no host waits inside its device"
                time.sleep(0.01)
        if self.how == "raises":
            raise ValueError("bad weather")
        if self.how == "dies" and engine:  # its connections close, and it leaves no word
            engine[0].mesh.own.abort()
        here().world.lose(FAILING)
        self.ended.wait(60)
        raise Stopped

    def play(self, rank: int, size: int) -> tuple[str, float, int]:
        """Return this rank's error, the seconds that it took from the failure on, and its waits in vain."""
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
            self.waiting += blocks
        start, error = time.monotonic(), ""
        try:
            if rank == FAILING and step is None:
                self.fail(engine)
            costs = None if self.phase == MEASURED else COSTS
            engine.append(make(blocks, program, mesh=mesh, overlap=3, timeout=LIMIT_S, costs=costs))
            for _ in range(5):
                start = time.monotonic()
                engine[0].step(inputs, target=target)
        except Stopped:
            return "stopped", 0.0, 0
        except Exception as caught:
            error = "\n".join([f"{type(caught).__name__}: {caught}", *getattr(caught, "__notes__", ())])
        took = time.monotonic() - start
        if engine:
            engine[0].close()
        if not (rank == FAILING and self.how == "raises"):
            self.ended.wait(60) if self.how != "raises" else None
        return error, took, sum(block.waits for block in blocks if isinstance(block, Waiting))


@pytest.mark.parametrize(
    ("how", "phase", "waits"),
    [
        ("raises", "the first step", False),
        *wide(
            ("raises", "the construction", False),
            ("raises", MEASURED, False),
            ("raises", "a planned step", False),
            ("raises", "a planned step", True),
            ("stops", "the first step", False),
            ("stops", "a planned step", False),
            ("stops", "a planned step", True),
            ("dies", MEASURED, False),
            ("dies", "a planned step", False),
            ("dies", "a planned step", True),
        ),
    ],
)
@over(1)
def test_all_others_end_and_say_why(rank: int, size: int, how: str, phase: str, waits: bool) -> None:
    with _soon():
        found = World(LAYOUT.size).run(Case(how, phase, waits).play)
    assert any(waited for *_, waited in found) == waits
    for number, (said, took, _) in enumerate(found):
        if number == FAILING:
            assert said.startswith("ValueError: bad weather" if how == "raises" else "stopped"), said
            continue
        assert said.startswith("LostRankError"), said
        assert "rank pp 1, ep 0" in said, said  # who
        if phase != "the construction":
            assert "bad weather" in said or how != "raises", said  # why
            assert ".f[" in said or ".b[" in said, said  # where
        assert took < (5 if waits else 3) * LIMIT_S  # it takes two limits to see that a device stands still


class Summing(nn.Module):
    """A layer that sums along a group of its own, before its host waits."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group, self.linear = group, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.group.allreduce([torch.ones(1)]).wait()
        return self.linear(x)


def _waits_for_its_own(rank: int, size: int) -> str:
    """Rank 1 waits in a sum of its own layer, to which rank 0 does not come."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    layers: list[nn.Module] = [nn.Identity(), Waiting(nn.Identity())]
    layers[0:0] = [nn.Linear(4, 4), Summing(mesh.get_group("cp"))]
    if rank == 0:
        layers[1] = Failing(layers[1], 4, _bad_weather)  # in the third step
    program = build_schedule("combined_1f1b", microbatches=2)
    options = {"costs": COSTS, "timeout": LIMIT_S, "reduce": False, "verify": False}
    engine = make(layers, program, mesh=mesh, loss_fn=nn.functional.mse_loss, **options)
    try:
        for _ in range(4):
            engine.step(torch.ones(4, 4), target=torch.ones(4, 4))
    except (ValueError, RuntimeError) as error:
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    return ""


def _bad_weather() -> None:
    raise ValueError("bad weather")


@over(1, timeout=40)
def test_a_host_that_waits_in_a_collective_of_the_model(rank: int, size: int) -> None:
    """It is ended with the groups of the user, which an engine leaves alone else."""
    # The world's threads each know their own groups; torch knows all of a process in every thread.
    with _soon(), patch.object(groups, "_registered", lambda group: group.group_desc == "default_pg"):
        own, other = World(2).run(_waits_for_its_own)
    assert own.startswith("ValueError: bad weather")
    assert other.startswith("LostRankError")
    assert "ValueError: bad weather" in other


BOTH = threading.Barrier(2)


def _uses_what_nobody_computed(rank: int, size: int) -> list[str]:
    """Rank 1 fails at an index, before and after rank 0 has told of a failure."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    program = build_schedule("combined_1f1b", microbatches=2)
    engine = Engine([nn.Linear(4, 4)], program, mesh=mesh, loss_fn=nn.functional.mse_loss)
    said = []
    for told in (False, True):
        if told and rank == 0:
            engine.mesh.failures.tell(ValueError("bad weather"), "rank cp 0 failed")
        BOTH.wait(10)
        if rank == 1:
            try:
                with engine.connection._communicators.watched():
                    raise IndexError("index out of range in self")
            except (IndexError, RuntimeError) as error:
                said.append(f"{type(error).__name__}: {error}")
        BOTH.wait(10)
    return said


@over(1, timeout=40)
def test_an_index_that_nobody_computed_is_not_the_cause(rank: int, size: int) -> None:
    """A rank that has ended its transfers may go on, and send to others whose transfers have not ended yet."""
    _, said = World(2).run(_uses_what_nobody_computed)
    assert said == [
        "IndexError: index out of range in self",
        "LostRankError: rank cp 0 failed: ValueError: bad weather; here since then: "
        "IndexError: index out of range in self",
    ]
