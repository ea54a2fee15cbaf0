"""With a capacity the host waits for nothing inside a step, and copies nothing that it does not read."""

from typing import Any
from unittest.mock import patch

from overlap1f1b.plan import Op
from overlap1f1b.transport.streams import HostCopy
from tests import models
from tests.device.standin import World, here
from tests.device.steps import Layout, batch_of, engine_of, program_of, stuck
from tests.ranks import over

MICROBATCHES = 5


def _step(rank: int, size: int, capacity: float | None) -> tuple[int, int, Any]:
    """Where the step begins in what the rank has written down, its dispatches, and its gradients."""
    layout, program = Layout(1, size), program_of("combined_1f1b", 1, MICROBATCHES)
    engine, model = engine_of(program, layout, capacity=capacity, verify=False)
    begin = len(here().log)
    engine.step(*batch_of(program, layout, rank))
    dispatches = sum(node.op is Op.DISPATCH and str(node.kind) == "F" for node in engine.plan.ranks[0])
    return begin, dispatches, models.held(engine, model)


def _waits(capacity: float | None) -> Any:
    """Of every rank: dispatches, then waits and copies to the host before the last node; and what is wrong."""
    world, original = World(2), HostCopy.on
    copies: dict[int, list[int]] = {0: [], 1: []}  # where they stand in what each rank has written down

    def counted(cls: type[HostCopy], *args: Any, **options: Any) -> HostCopy:
        copies[here().number].append(len(here().log))
        return original(*args, **options)

    with patch.object(HostCopy, "on", classmethod(counted)):
        found = world.run(_step, capacity)
    logs = [log[begin:] for log, (begin, *_) in zip(world.logs, found, strict=True)]
    rows = []
    for number, (log, (begin, dispatches, _)) in enumerate(zip(logs, found, strict=True)):
        nodes = [at for at, entry in enumerate(log) if entry.kind == "node"]
        waits = sum(entry.kind in ("block", "sync") for entry in log[: nodes[-1]])
        rows.append((dispatches, waits, sum(at < begin + nodes[-1] for at in copies[number])))
    return rows, stuck(logs), [gradients for *_, gradients in found]


@over(1)
def test_the_host_waits_for_counts_only_without_a_capacity(rank: int, size: int) -> None:
    """And gradients are those of exact sizes."""
    exact, padded = (_waits(capacity) for capacity in (None, 2.0))
    for waiting, (rows, hangs, _) in ((True, exact), (False, padded)):
        assert not hangs
        for dispatches, waits, copies in rows:
            assert dispatches > 0
            assert waits == copies == (dispatches if waiting else 0)
    for one, other in zip(exact[-1], padded[-1], strict=True):
        assert not models.equal(one, other)
