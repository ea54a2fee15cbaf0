"""What a program or a plan would cost."""

from __future__ import annotations

from typing import overload

from overlap1f1b.plan import NodeCosts, Plan
from overlap1f1b.schedule import Program
from overlap1f1b.simulation.actions import ProgramTimeline, play_actions
from overlap1f1b.simulation.costs import Costs
from overlap1f1b.simulation.timeline import Timeline
from overlap1f1b.simulation.timeline import simulate as simulate_plan


@overload
def simulate(what: Plan, costs: NodeCosts, *, counts_block: bool = False) -> Timeline: ...


@overload
def simulate(what: Program, costs: Costs) -> ProgramTimeline: ...


def simulate(
    what: Plan | Program, costs: NodeCosts | Costs, *, counts_block: bool = False
) -> Timeline | ProgramTimeline:
    """The Timeline of a program's actions on its ranks, or of a plan's nodes on the lanes of one rank.

    >>> from overlap1f1b.schedule import build_schedule
    >>> simulate(build_schedule("zb_h1", ranks=8, microbatches=32), Costs(forward=1, backward=2, weight=1)).makespan
    103.0

    Args:
        what: What is played; a program is checked first.
        costs: Costs of actions for a program, of nodes for a plan.
        counts_block: Whether the thread that issues a plan waits for counts itself.

    Raises:
        ValueError: A program that breaks a rule, or costs of the other kind.
    """
    if isinstance(what, Program) and isinstance(costs, Costs):
        what.check()
        return play_actions(what, costs)
    if isinstance(what, Plan) and isinstance(costs, NodeCosts):
        return simulate_plan(what, costs, counts_block=counts_block)
    raise ValueError(
        f"simulate({type(what).__name__}, {type(costs).__name__}); allowed: a Program with Costs, a Plan with NodeCosts"
    )
