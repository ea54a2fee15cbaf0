"""Weight gradients that are taken early."""

from __future__ import annotations

import time

from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b import NodeCosts, build_schedule
from overlap1f1b.plan import Resource
from overlap1f1b.schedule import Kind
from overlap1f1b.transport.exchange import build_exchange
from tests import models
from tests.engine.test_engine import Delayed
from tests.engines import make
from tests.plan.tries import all_tries
from tests.ranks import Ranks


class Slow(Delayed):
    """Every exchange is late."""

    def _pause(self) -> None:
        time.sleep(0.004)


def _early(rank: int, size: int, name: str) -> list[str]:
    mesh, data = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)), models.batch(5, seed=rank, sequence=7)
    group, reference, problems = mesh.get_group("ep"), None, []
    costs = NodeCosts.uniform(attention=3, experts=4, dispatch=0.1)  # as if nothing had to be waited for
    for exchange in (build_exchange(group), Slow(build_exchange(group), seed=rank)):
        model = models.build(group)
        program = build_schedule(name, microbatches=5)
        engine = make(model, program, mesh=mesh, exchange=exchange, costs=costs, timeout=20)
        with all_tries():  # the plan has weight gradients that are placed late
            result = engine.step(data[0], target=data[1])
        planned = [node for node in engine.plan.ranks[0] if node.resource is Resource.COMPUTE]
        found = [span.node for span in result.overlap.spans if span.node.resource is Resource.COMPUTE]
        for weight in (True, False):
            kept = [[node for node in order if (node.kind is Kind.W) is weight] for order in (planned, found)]
            problems += ["another order"] * (kept[0] != kept[1])
        placed = program.splits(0) or name == "auto"
        if isinstance(exchange, Slow) and (found == planned) is not placed:
            problems.append("nothing was taken early, or what the program or the search has placed")
        if result.peak_held > engine.plan.peak_held:
            problems.append(f"{result.peak_held} held, planned {engine.plan.peak_held}")
        found_gradients = models.gradients(model)
        problems += models.equal(found_gradients, reference or found_gradients)
        reference = found_gradients
    return problems


def test_late_exchanges_are_waited_for_with_weight_gradients(ranks2: Ranks) -> None:
    for name in ("sequential", "combined_1f1b", "zb_h1", "auto"):
        assert ranks2.run(_early, name) == [[], []]
