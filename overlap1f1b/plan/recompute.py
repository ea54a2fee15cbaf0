"""What each block computes again: the bytes that this saves, for the time that it takes."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from overlap1f1b.plan.costs import Cost, CostKey, Held, NodeCosts
from overlap1f1b.plan.node import MOVES, OF_PARAMETERS, RECOMPUTES, Recompute, StageShape
from overlap1f1b.schedule import Kind

Measured = Mapping[Recompute, tuple[NodeCosts, tuple[StageShape, ...]]]
"""Costs, and shapes of all stages, of steps in which every block recomputes alike."""
CHOICES = 8
"""How many choices between none and the most are yielded at most."""


def choices(measured: Measured) -> Iterator[tuple[NodeCosts, tuple[StageShape, ...]]]:
    """Yield costs and shapes of steps in which more and more blocks recompute, and of those in which all do alike.

    Blocks begin in the order of the bytes that a microbatch saves in them for each unit of time.
    """
    _, shapes = measured["none"]
    modes: dict[tuple[int, int], Recompute] = {
        (stage, block): "none" for stage, blocks in enumerate(shapes) for block in range(len(blocks))
    }
    without = {place: _held(measured["none"][0], *place) for place in modes}
    steps = []
    for mode, (costs, _) in measured.items():
        took = dict.fromkeys(modes, 0.0)
        for key, cost in costs.by_node.items():
            if key[0] in RECOMPUTES and not isinstance(cost, tuple):
                took[key[2], key[3]] += cost
        for place in modes:
            saved = without[place] - _held(costs, *place)
            if saved > 0 < took[place]:
                steps.append((saved / took[place], saved, place, mode))
    saved_by, path = dict.fromkeys(modes, 0.0), [dict(modes)]
    for _, saved, place, mode in sorted(steps, reverse=True):
        if saved > saved_by[place]:
            saved_by[place], modes[place] = saved, mode
            path.append(dict(modes))
    for at in sorted({round(number * (len(path) - 1) / CHOICES) for number in range(CHOICES + 1)}):
        yield _mixed(measured, path[at])
    yield from (alike for mode, alike in measured.items() if mode != "none")


def _held(costs: NodeCosts, stage: int, block: int) -> float:
    """Return the bytes that a microbatch holds in a block after its forward, if nothing leaves."""
    mine = (of for key, of in costs.bytes.items() if key[1:4] == (Kind.F, stage, block) and key[0] not in MOVES)
    return sum(of.kept for of in mine)


def _mixed(measured: Measured, modes: Mapping[tuple[int, int], Recompute]) -> tuple[NodeCosts, tuple[StageShape, ...]]:
    """Return costs and shapes of a step in which each block has a mode of its own."""
    by_node, held = dict[CostKey, Cost](), dict[CostKey, Held]()
    for mode, (costs, _) in measured.items():
        by_node |= {key: cost for key, cost in costs.by_node.items() if modes[key[2], key[3]] == mode}
        held |= {key: of for key, of in costs.bytes.items() if modes[key[2], key[3]] == mode}
    shapes = tuple(
        tuple(measured[modes[stage, block]][1][stage][block] for block in range(len(blocks)))
        for stage, blocks in enumerate(measured["none"][1])
    )
    ordered = dict(sorted(held.items(), key=lambda one: -one[0][3]))  # the first block's backward comes last
    return replace(measured["none"][0], by_node=by_node, bytes=balanced(ordered)), shapes


def balanced(held: Mapping[CostKey, Held]) -> dict[CostKey, Held]:
    """Return what nodes hold so that a microbatch leaves nothing behind; the last node of each stage takes the rest."""
    found, left, last = dict(held), dict[int, float](), dict[int, CostKey]()
    for key, of in held.items():
        if key[0] not in OF_PARAMETERS:
            left[key[2]], last[key[2]] = left.get(key[2], 0.0) + of.kept, key
    for stage, key in last.items():
        found[key] = found[key]._replace(kept=found[key].kept - left[stage])
    return found
