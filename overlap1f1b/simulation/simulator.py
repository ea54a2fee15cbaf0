"""The simulator: the timeline of a program or a plan."""

from typing import overload

from overlap1f1b.plan import BlockShape, NodeCosts, Overlap, Plan, compile, parse_parts
from overlap1f1b.schedule import Program
from overlap1f1b.schedule.values import check_size, checked
from overlap1f1b.simulation.actions import Costs, ProgramTimeline, play_actions
from overlap1f1b.simulation.timeline import PlanTimeline, play_nodes


@overload
def simulate(what: Program, costs: Costs) -> ProgramTimeline: ...


@overload
def simulate(
    what: Program,
    costs: NodeCosts,
    *,
    overlap: Overlap | None = None,
    layers: int | None = None,
    parts: int | None = None,
    counts_block: bool = False,
) -> PlanTimeline: ...


@overload
def simulate(what: Plan, costs: NodeCosts, *, counts_block: bool = False) -> PlanTimeline: ...


@checked
def simulate(
    what: Plan | Program,
    costs: NodeCosts | Costs,
    *,
    overlap: Overlap | None = None,
    layers: int | None = None,
    parts: int | None = None,
    counts_block: bool = False,
) -> PlanTimeline | ProgramTimeline:
    """Return the timeline of a program's actions, or of a plan's nodes; the plan is given or compiled from a program.

    >>> from overlap1f1b.schedule import build_schedule
    >>> program = build_schedule("zb_h1", ranks=4, microbatches=8)
    >>> simulate(program, Costs(forward=1, backward=2, weight=1)).makespan
    27.0
    >>> simulate(program, NodeCosts.uniform(attention=3, experts=4, dispatch=2), overlap=3).makespan
    277.0

    In parts, exchanges of one microbatch travel behind its own experts.

    >>> one, costs = build_schedule("sequential", microbatches=1), NodeCosts.uniform(attention=3, experts=4, dispatch=5)
    >>> [simulate(one, costs, layers=4, parts=parts).makespan for parts in (1, 2, 4)]
    [139.0, 111.0, 110.0]

    With launch costs there are two clocks: the host launches one node after another, and a device plays them.

    >>> costs = NodeCosts.uniform(attention=3, experts=4, dispatch=2, launch=2)
    >>> step = simulate(build_schedule("combined_1f1b", microbatches=2), costs, overlap=2, counts_block=True)
    >>> step.makespan, step.ranks[0].late, step.ranks[0].host[0].end
    (61.0, 15.0, 2.0)

    Args:
        what: The program or plan to play; a program is checked first.
        costs: Costs of actions, or of nodes. Where a copy to host memory takes time, all activations leave.
        overlap: For a program with costs of nodes: ``"serial"``, ``"pairs"`` or k; by default 3.
        layers: For a program with costs of nodes: blocks of a stage, each with experts; by default 1.
        parts: For a program with costs of nodes: parts of the tokens of each call of experts, which share its costs; by
            default 1.
        counts_block: With costs of nodes: whether the host waits for counts, as on a GPU with exact sizes.

    Raises:
        ValueError: The program breaks a rule, the costs are of the wrong kind, ``layers`` is under 1, or an argument
            has no meaning for this program or plan.
    """
    options = {"overlap": overlap, "layers": layers, "parts": parts, "counts_block": counts_block or None}
    for name, value in options.items():  # those without an effect are refused
        if value is not None and isinstance(costs, Costs):
            raise ValueError(f"{name}={value!r} with Costs, which have no sub-ops; allowed: with NodeCosts")
        if value is not None and isinstance(what, Plan) and name != "counts_block":
            raise ValueError(f"{name}={value!r} with a Plan, which sets it; allowed: with a Program")
    if isinstance(what, Program) and isinstance(costs, Costs):
        what.check()
        return play_actions(what, costs)
    if isinstance(what, Program) and isinstance(costs, NodeCosts):
        layers, overlap = 1 if layers is None else layers, 3 if overlap is None else overlap
        check_size("layers", layers)
        parts = parse_parts(1 if parts is None else parts)
        shape, costs = BlockShape(expert_calls=1, parts=parts, offload=costs.moves), costs.in_parts(parts)
        what = compile(what, (shape,) * layers, costs, overlap, counts_block=counts_block)
    if isinstance(what, Plan) and isinstance(costs, NodeCosts):
        return play_nodes(what, costs, counts_block=counts_block)
    raise ValueError(
        f"simulate({type(what).__name__}, {type(costs).__name__}); "
        "allowed: a Program with Costs or NodeCosts, a Plan with NodeCosts"
    )
