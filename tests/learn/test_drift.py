"""A plan follows node times that leave what it was made for, on all ranks alike, and stays on noise."""

from __future__ import annotations

import math
import random
import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b.learn import tuner
from overlap1f1b.learn.drift import EVERY, TABLES, Drift, left
from overlap1f1b.learn.purpose import Purpose
from overlap1f1b.plan import Node, NodeCosts, Op, Span
from overlap1f1b.running.link import PacedExchange
from overlap1f1b.schedule import Kind, build_schedule
from overlap1f1b.simulation import Timeline, simulate
from overlap1f1b.transport.exchange import own_exchange
from overlap1f1b.transport.mesh import Mesh
from tests import models
from tests.engines import make
from tests.ranks import Ranks

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
    return [left({0: drift.changes}) for number in range(first, first + steps) if drift.note(number, step(**given))]


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


def test_costs_are_scaled_by_the_change() -> None:
    drift = Drift()
    noted(drift, TABLES * EVERY)
    noted(drift, TABLES * EVERY, exchange=3.0)
    by_node = {(Op.DISPATCH, Kind.F, 0, 0, 0, 0): 4.0, (Op.EXPERTS, Kind.F, 0, 0, 0, 0): 2.0}
    scaled = drift.scaled(NodeCosts(by_node=by_node), Mesh(None))
    assert scaled(Node(Op.DISPATCH, Kind.F, 0, 0)) == pytest.approx(12)
    assert scaled(Node(Op.EXPERTS, Kind.F, 0, 0)) == pytest.approx(2)


def _losses(rank: int, size: int, drifts: bool) -> tuple[list[float], list[str], list[str]]:
    """Losses of a training whose link becomes slow; what its steps were for, and what was said."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    link = PacedExchange(own_exchange(mesh.get_group("ep")), 1.0)
    model, losses, purposes = models.build(mesh.get_group("ep")), [], []
    program = build_schedule("combined_1f1b", microbatches=3)
    given = {"drift": True} if drifts else {"costs": COSTS}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"mesh": mesh, "exchange": link, "tries": 0, "timeout": 60}
    told = patch.object(tuner, "TOLD", math.inf)  # of every step, though they are short
    with told, make(model, program, **options, **given) as engine, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for number in range(2 * TABLES * EVERY + 12):
            if number == 2 + TABLES * EVERY:
                link.gbps = 1e-4  # a row of 100 bytes takes a microsecond, a call some milliseconds
            purposes.append(engine.tuner.coming.purpose.value)
            result = engine.step(*models.batch(3, seed=number * size + rank))
            losses.append(engine.mean_loss(result))
            optimizer.step()
            optimizer.zero_grad()
    return losses, purposes, [text for one in said if "what the plan was made for" in (text := str(one.message))]


def test_a_run_goes_over_to_another_plan_and_its_losses_stay(ranks2: Ranks) -> None:
    (losses, purposes, said), (others, other_purposes, other_said) = ranks2.run(_losses, True)
    assert purposes == other_purposes
    assert Purpose.ADAPT in purposes
    assert len(said) == 1
    assert said[0].startswith("node times have left what the plan was made for, exchanges take ")
    assert not other_said  # the first rank speaks
    (plain, plain_purposes, plain_said), _ = ranks2.run(_losses, False)
    assert losses == others == plain
    assert Purpose.ADAPT not in plain_purposes
    assert not plain_said
