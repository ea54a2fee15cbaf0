"""What each block computes again, by the bytes that this saves for the time that it takes."""

from overlap1f1b.plan import BlockShape, Held, NodeCosts, Op, Recompute, StageShape, choices
from overlap1f1b.plan.costs import CostKey
from overlap1f1b.schedule import Kind


def table(
    mode: Recompute, held: tuple[float, float], took: tuple[float, float]
) -> tuple[NodeCosts, tuple[StageShape, ...]]:
    """Costs of a stage of two dense blocks: what a microbatch holds in each, and what each takes to compute again."""
    times: dict[CostKey, float] = {}
    bytes_of: dict[CostKey, Held] = {}
    for block in (0, 1):
        times[Op.DENSE, Kind.F, 0, block, 0, 0] = 1.0
        bytes_of[Op.DENSE, Kind.F, 0, block, 0, 0] = Held(held[block], held[block])
        if mode != "none":
            times[Op.RECOMPUTE_DENSE, Kind.I, 0, block, 0, 0] = took[block]
    for block in (1, 0):
        bytes_of[Op.DENSE, Kind.I, 0, block, 0, 0] = Held(-held[block], 0.0)
    return NodeCosts(by_node=times, bytes=bytes_of), ((BlockShape(0, recompute=mode),) * 2,)


def test_blocks_begin_where_a_second_saves_the_most() -> None:
    found = list(choices({"none": table("none", (10, 10), (0, 0)), "block": table("block", (6, 1), (1, 3))}))
    assert [[block.recompute for block in shapes[0]] for _, shapes in found] == [
        ["none", "none"],
        ["block", "none"],
        ["block", "block"],
        ["block", "block"],  # measured
    ]
    forwards = [sum(of.kept for key, of in costs.bytes.items() if key[1] is Kind.F) for costs, _ in found]
    assert forwards == [20, 16, 7, 7]
    assert all(sum(of.kept for of in costs.bytes.values()) == 0 for costs, _ in found)
    assert [sum(key[0] is Op.RECOMPUTE_DENSE for key in costs.by_node) for costs, _ in found] == [0, 1, 2, 2]


def test_a_mode_that_saves_more_follows_one_that_saves_less() -> None:
    tables = {"none": table("none", (10, 10), (0, 0)), "attention": table("attention", (6, 10), (1, 1))}
    tables["block"] = table("block", (2, 10), (3, 1))
    found = [shapes[0][0].recompute for _, shapes in choices(tables)]  # type: ignore[arg-type]
    assert found == ["none", "attention", "block", "attention", "block"]
