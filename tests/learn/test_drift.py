"""A plan follows node times that leave what it was made for, on all ranks alike, and stays on noise."""

from __future__ import annotations

import math
import random
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b.learn import drift as learned
from overlap1f1b.learn import pooling
from overlap1f1b.learn.drift import EVERY, TABLES, WINDOWS, Drift, Search, Table
from overlap1f1b.learn.peers import Peers
from overlap1f1b.learn.planner import Planner
from overlap1f1b.learn.purpose import Purpose
from overlap1f1b.plan import (
    EXCHANGED,
    BlockShape,
    Node,
    NodeCosts,
    Op,
    Overlap,
    Plan,
    Resource,
    Span,
    compile,
    cost_key,
)
from overlap1f1b.schedule import Kind, build_schedule
from overlap1f1b.simulation import Timeline, simulate
from overlap1f1b.transport.mesh import Mesh
from tests import models
from tests.engines import make
from tests.ranks import Ranks
from tests.tiers import wide

COSTS = NodeCosts.uniform(attention=3, experts=4, dispatch=4, counts=0.2)


def step(exchange: float = 1.0, compute: float = 1.0, noise: random.Random | None = None) -> Timeline:
    """Nodes one after another, longer by factors."""
    now, spans = 0.0, []
    for node, start, end in (
        simulate(build_schedule("sequential", microbatches=4), COSTS, overlap="serial").ranks[0].spans
    ):
        factor = exchange if node.op in (Op.COUNTS, Op.DISPATCH, Op.COMBINE) else compute
        time = (end - start) * factor * (1.0 if noise is None else noise.uniform(0.9, 1.1))
        spans.append(Span(node, now, now + time))
        now += time
    return Timeline(tuple(spans), costs=COSTS)


def noted(drift: Drift, steps: int, **given: Any) -> list[bool]:
    """Whether ranks would go over to another plan, each time they compare."""
    first = getattr(drift, "steps", 0)
    drift.steps = first + steps  # type: ignore[attr-defined]
    return [drift.left for number in range(first, first + steps) if drift.note(number, step(**given))]


def test_noise_changes_nothing() -> None:
    found = noted(Drift(), 500, noise=random.Random(3))
    assert len(found) == 500 // EVERY - 2 * TABLES + 1
    assert not any(found)


@pytest.mark.parametrize(("change", "expected"), [({"exchange": 2.0}, (2.0, 1.0)), ({"compute": 0.6}, (1.0, 0.6))])
def test_a_change_is_found_when_all_tables_have_it(change: dict[str, float], expected: tuple[float, float]) -> None:
    drift = Drift()
    assert not any(noted(drift, 30 * EVERY))
    assert noted(drift, TABLES * EVERY, **change) == [False, False, True]
    assert drift.changes == pytest.approx(expected)


def test_a_change_for_which_the_plan_was_kept_is_found_once() -> None:
    drift = Drift()
    noted(drift, TABLES * EVERY)
    assert noted(drift, TABLES * EVERY, exchange=2.0)[-1]
    drift.keep()
    assert not any(noted(drift, 30 * EVERY, exchange=2.2))
    assert noted(drift, TABLES * EVERY, exchange=4.0)[-1]
    assert noted(drift, TABLES * EVERY)[-1]  # back again


def searched(make: Callable[[Callable[[float], None]], list[Plan]], before: Plan) -> Search:
    return Search(make, COSTS, before, Peers(Mesh(None)))


@pytest.mark.parametrize(
    ("before", "after", "tried", "gains"),
    [("serial", 3, 2, True), ("serial", 3, 90, False), (3, 3, 0, False), *wide((3, "serial", 2, False))],
)
def test_a_plan_gains_if_it_pays_within_a_hundred_steps(
    before: Overlap, after: Overlap, tried: int, gains: bool
) -> None:
    program = build_schedule("combined_1f1b", microbatches=4)
    one, other = (compile(program, (BlockShape(expert_calls=1),), COSTS, overlap) for overlap in (before, after))
    search = searched(lambda _: [other], one)
    while not search.found():
        time.sleep(0.001)
    assert search.plans == [other]
    assert search.gains(COSTS, tried=tried, counts_block=False) is gains


def test_without_plans_within_the_limit_the_one_before_stays() -> None:
    def make(progress: Callable[[float], None]) -> list[Plan]:
        raise ValueError("memory")

    plan = compile(build_schedule("sequential", microbatches=2), (BlockShape(expert_calls=1),), COSTS, 1)
    search = searched(make, plan)
    while not search.found():
        time.sleep(0.001)
    assert search.plans == [plan]
    assert not search.gains(COSTS, tried=0, counts_block=False)


def _closed(rank: int, size: int, by: str) -> list[str]:
    """Threads of searches while an engine whose plan is searched anew plays, and behind their end."""
    mesh, found = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)), []

    def fastest(planner: Planner, *_: Any) -> list[Plan]:
        while True:
            planner.progress(0.0)
            time.sleep(0.001)

    def threads() -> str:
        return ", ".join(thread.name for thread in threading.enumerate() if thread.name == "overlap1f1b-search")

    options: dict[str, Any] = {"mesh": mesh, "tries": 0, "timeout": 60, "drift": True}
    pooled, moves = patch.object(pooling, "PART", math.inf), patch.object(Drift, "left", True)
    program = build_schedule("combined_1f1b", microbatches=2)
    with pooled, moves, make(models.build(mesh.get_group("ep")), program, **options) as engine:
        while engine.tuner.settling:
            engine.step(*models.batch(2, seed=rank))
        with patch.object(Planner, "ranked", fastest):
            while engine.tuner.next_step().purpose is not Purpose.ADAPT:
                engine.step(*models.batch(2, seed=rank))
            engine.step(*models.batch(2, seed=rank))
            found.append(threads())
            if by == "close":
                engine.close()
            else:
                engine.plan = engine.plan
                assert not engine.tuner.settling
            found.append(threads())
    return found


@pytest.mark.parametrize("by", ["close", "plan"])
def test_a_search_ends_with_its_engine_or_when_a_plan_is_set(ranks2: Ranks, by: str) -> None:
    assert ranks2.run(_closed, by) == [["overlap1f1b-search", ""], ["", ""]]  # the first rank searches


def test_costs_are_scaled_by_the_change() -> None:
    drift = Drift()
    noted(drift, TABLES * EVERY)
    noted(drift, TABLES * EVERY, exchange=3.0)
    by_node = {(Op.DISPATCH, Kind.F, 0, 0, 0, 0): 4.0, (Op.EXPERTS, Kind.F, 0, 0, 0, 0): 2.0}
    scaled = drift.scaled(NodeCosts(by_node=by_node), Mesh(None))
    assert scaled(Node(Op.DISPATCH, Kind.F, 0, 0)) == pytest.approx(12)
    assert scaled(Node(Op.EXPERTS, Kind.F, 0, 0)) == pytest.approx(2)


def _losses(rank: int, size: int, drifts: bool, tries: int = 0) -> tuple[list[float], list[str], list[str]]:
    """Losses of a training whose link becomes slow; what its steps were for, and what was said.

    Tables and gains are made up: those of such short steps vary more than a change.
    """
    mesh, slow = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)), []
    model, losses, purposes = models.build(mesh.get_group("ep")), [], []
    program = build_schedule("combined_1f1b", microbatches=3)
    given = {"drift": True} if drifts else {"costs": COSTS}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def table_of(timeline: Timeline) -> Table:
        keys = [cost_key(node) for node, *_ in timeline.spans if node.resource is not Resource.PEER]
        return {key: 30.0 if slow and key[0] in EXCHANGED else 1.0 for key in keys}

    with (
        patch.object(pooling, "PART", math.inf),  # every step, though they are short
        patch.object(learned, "table_of", table_of),
        patch.object(Search, "gains", lambda *_, **__: True),
        make(model, program, mesh=mesh, tries=tries, timeout=60, **given) as engine,
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        while (
            engine.tuner.next_step().purpose is not Purpose.SETTLED or len(losses) < 30 + (4 * TABLES + WINDOWS) * EVERY
        ):
            slow += ["now"] * (len(losses) == 20 + TABLES * EVERY)
            purposes.append(engine.tuner.next_step().purpose.value)
            result = engine.step(*models.batch(3, seed=len(losses) * size + rank))
            losses.append(engine.mean_loss(result))
            optimizer.step()
            optimizer.zero_grad()
    return losses, purposes, [text for one in said if "what the plan was made for" in (text := str(one.message))]


@pytest.mark.parametrize("tries", [0, *wide(1)])
def test_a_run_goes_over_to_another_plan_and_its_losses_stay(ranks2: Ranks, tries: int) -> None:
    (losses, purposes, said), (others, other_purposes, other_said) = ranks2.run(_losses, True, tries)
    assert purposes == other_purposes
    assert purposes.count(Purpose.ADAPT) >= WINDOWS
    assert (Purpose.TRY in purposes[purposes.index(Purpose.ADAPT) :]) is (tries > 0)  # the plan before beside others
    assert len(said) == 1 or tries  # unless the plan before is as fast
    assert all("exchanges take 30.00 and compute 1.00 times as long: from step" in line for line in said)
    assert not other_said  # the first rank speaks
    (plain, plain_purposes, plain_said), _ = ranks2.run(_losses, False)
    assert losses == others
    assert losses[: len(plain)] == plain[: len(losses)]  # a search takes steps
    assert Purpose.ADAPT not in plain_purposes
    assert not plain_said
