"""Communicators of an engine: made once, in one order, within one budget, and all released."""

import gc
import itertools
import os
import threading
import time
from collections import defaultdict, deque
from typing import Any
from unittest.mock import patch

import pytest
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b.schedule import build_schedule
from overlap1f1b.transport import groups
from overlap1f1b.transport.exchange import CollectiveExchange
from tests import models
from tests.device.model import hangs
from tests.device.standin import World, here
from tests.device.steps import COSTS, Layout, batch_of, engine_of, mesh_of, one_at_a_time, program_of
from tests.engines import make
from tests.ranks import over
from tests.reduce.test_ties import Stage
from tests.tiers import wide


def _made(rank: int, size: int, layout: Layout, found: dict[int, Any]) -> None:
    program = program_of("dualpipe", layout.pp, 2 * layout.pp)
    with engine_of(program, layout, verify=False)[0] as engine:
        made = len(here().log)
        inputs, target = batch_of(program, layout, rank)
        engine.step(inputs, target=target)
        assert isinstance(engine.connection.exchange, CollectiveExchange)
        links = [
            link.payload
            for links in (engine.connection.boundary._out, engine.connection.boundary._in)
            for link in links.values()
        ]
        neighbours = 2 if 0 < rank // layout.ep < layout.pp - 1 else 1
        assert len({id(link) for link in links}) == len(links) == 2 * neighbours
        found[rank] = here().log[:made], here().log[made:]
    with pytest.raises(RuntimeError, match="this engine is closed; allowed: a new one"):
        engine.step(inputs, target=target)
    engine.close()


@over(1)
def test_communicators_are_made_in_the_constructor(rank: int, size: int) -> None:
    layout = Layout(4, 2)
    world, found, budgets = World(layout.size), dict[int, Any](), defaultdict[int, dict[str, int]](dict)
    on_device = groups.Groups._on_device

    def noting(self: groups.Groups, store: Any, rank: int, ranks: Any, name: str, ctas: Any) -> Any:
        budgets[here().number][name] = ctas
        assert self.timeout.total_seconds() == 30
        return on_device(self, store, rank, ranks, name, ctas)

    with patch.object(groups.Groups, "_on_device", noting):
        world.run(_made, layout, found)
    for number in range(layout.size):
        made, stepped = found[number]
        assert sum(entry.kind == "create" for entry in made) == len(budgets[number])
        assert not [entry for entry in stepped if entry.kind == "create"]  # a step makes none
        assert sum(budgets[number].values()) <= 32
    assert not hangs([found[number][0] for number in range(layout.size)])  # whoever comes first
    assert len(world.closed) == sum(map(len, budgets.values()))


MEET = threading.Barrier(4)


def _many(
    rank: int, size: int, count: int, sizes: list[tuple[int, ...]], how: str, earlier: set[threading.Thread]
) -> None:
    program, layout = program_of("combined_1f1b", 2), Layout(2, 2)
    inputs, target = batch_of(program, layout, rank)
    mesh = mesh_of(layout)  # its groups are the user's, and stay
    for number in range(count):
        engine, _ = engine_of(program, layout, mesh)
        if number < 2 or number == count - 1:
            engine.step(inputs, target=target)
        if how == "closed":
            engine.close()
        del engine
        if number in (1, count - 1):
            MEET.wait(60)
            if rank == 0:
                while any(thread.name == "overlap1f1b-frees" for thread in {*threading.enumerate()} - earlier):
                    time.sleep(0.005)
                world = here().world
                world.forget()
                gc.collect()
                descriptors = len(os.listdir("/proc/self/fd"))
                # The stand-in keeps a count and a queue for every pair of ranks that a group had.
                objects = sum(not isinstance(found, itertools.count | deque) for found in gc.get_objects())
                sizes.append((len(world.groups), threading.active_count(), descriptors, objects))
            MEET.wait(60)


@pytest.mark.parametrize(("how", "count"), [("closed", 7), *wide(("dropped", 8))])
@over(1)
def test_many_engines_leave_nothing(rank: int, size: int, how: str, count: int) -> None:
    sizes: list[tuple[int, ...]] = []
    at_once = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0"}
    with patch.object(groups, "FREED_S", 0.0), patch.dict(os.environ, at_once):
        World(4).run(_many, count, sizes, how, set(threading.enumerate()))
    first, last = sizes
    assert last[:3] <= first[:3], (first, last)  # communicators, threads, file descriptors
    assert last[3] < first[3] + 2 * count, (first, last)  # objects: an engine that stayed would leave thousands


def _tied(rank: int, size: int) -> None:
    """Ties between the first and the last stage, so that the middle rank holds fewer groups; then another engine."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("pp",))
    program = build_schedule("1f1b", ranks=size, microbatches=4)
    inputs, target = models.batch(4)
    for _ in range(2):
        with one_at_a_time:
            blocks = list(models.build(tied=True, layers=2))
        ends = {0: {"weight": blocks[0].weight}, size - 1: {"weight": blocks[-1].weight}}
        cut = [blocks[:1], blocks[1:3], blocks[3:]]
        stages = {rank: Stage(cut[rank], ends.get(rank, {}))}  # type: ignore[arg-type]
        make(stages, program, mesh=mesh, costs=COSTS, timeout=20, verify=False).step(inputs, target=target)


@over(1)
def test_a_second_engine_meets_after_ties(rank: int, size: int) -> None:
    world = World(3)
    world.run(_tied)
    assert not (stuck := hangs(world.logs)), stuck
