"""Costs that an engine measures on a device."""

from overlap1f1b.learn.tuner import WARM_STEPS
from overlap1f1b.plan import CostKey, NodeCosts, Op
from overlap1f1b.schedule import Kind
from tests.device.standin import World, here
from tests.device.steps import Layout, batch_of, engine_of, program_of, stuck
from tests.plan.rules import meets
from tests.ranks import over

LAYOUT = Layout(2, 2)


def _measured(rank: int, size: int) -> tuple[int, NodeCosts, str, set[tuple[Op, Kind]], int, set[CostKey]]:
    program = program_of("combined_1f1b", LAYOUT.pp)
    engine, _ = engine_of(program, LAYOUT, costs=None, tries=1)
    inputs, target = batch_of(program, LAYOUT, rank)
    steps, timed, alone = 0, set[CostKey](), engine.connection.boundary.timed
    computed = sum(node.resource == "compute" for node in engine.plan.ranks[engine.mesh.rank("pp")])

    def noted() -> dict[CostKey, float]:
        took = alone()
        timed.update(took)
        return took

    engine.connection.boundary.timed = noted  # type: ignore[method-assign]
    while engine.costs is None:
        begin = len(here().log)
        engine.step(inputs, target=target)
        steps += 1
    held = sum("sleep" in entry.args for entry in here().log[begin:])
    while engine.tuner.settling:  # plans are tried
        assert meets(engine.plan)
        engine.step(inputs, target=target)
    engine.close()
    launched = {(node.op, node.kind) for nodes in engine.plan.ranks for node in nodes}
    return steps, engine.costs, engine.plan.fingerprint, launched, held - computed, timed


@over(1)
def test_every_rank_has_the_same_launch_costs_and_nothing_hangs(rank: int, size: int) -> None:
    world = World(LAYOUT.size)
    found = world.run(_measured)
    problems = [f"{setting}: {waits}" for setting, waits in stuck(world.logs)]
    steps, costs, fingerprint, launched, *_ = found[0]
    if steps != WARM_STEPS + 1:
        problems.append(f"measured in step {steps}")
    if set(costs.launch) != launched or not all(time > 0 for time in costs.launch.values()):
        problems.append(f"launches of {sorted(set(costs.launch) ^ launched)}")
    sends = {key for key in costs.by_node if key[0] is Op.SEND}
    if not sends or sends != found[0][5] | found[2][5]:  # the ranks of both pipeline ranks receive
        problems.append(f"sends {sends}, timed {found[0][5]} and {found[2][5]}")
    for number, other in enumerate(found):
        if (other[0], other[1], other[2]) != (steps, costs, fingerprint):
            problems.append(f"rank {number} has other costs")
        if other[4]:
            problems.append(f"rank {number} held the device {other[4]} times more often than it computed")
    assert not problems, problems
