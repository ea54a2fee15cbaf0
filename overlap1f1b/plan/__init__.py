"""Floor ``plan``: sub-op nodes of every action, and the order in which a rank issues them. Pure Python, no torch."""

from overlap1f1b.plan.bounds import bound, pipeline_bound
from overlap1f1b.plan.budget import Budget
from overlap1f1b.plan.chains import Chains
from overlap1f1b.plan.clock import Span, play_clocks, play_ranks
from overlap1f1b.plan.compiler import compile, fastest
from overlap1f1b.plan.costs import CostKey, Held, NodeCosts, cost_key
from overlap1f1b.plan.node import (
    EXCHANGED,
    MOVES,
    OF_PARAMETERS,
    OWN_AGAIN,
    RECOMPUTES,
    RESOURCE_OF,
    BlockShape,
    Node,
    Op,
    Place,
    Recompute,
    Resource,
    StageShape,
    awaited_by,
    parse_parts,
    parse_recompute,
    peer_of,
    segments_of,
)
from overlap1f1b.plan.offload import leaving, offloaded
from overlap1f1b.plan.plan import Overlap, Plan, parse_overlap
from overlap1f1b.plan.ranges import About, ActionRange, Label, NodeRange, StepRange, parse_node, parse_range
from overlap1f1b.plan.recompute import balanced, choices
from overlap1f1b.plan.rendezvous import with_rendezvous
from overlap1f1b.plan.routing import exchanged_bytes, row_bytes, rows_per_token
from overlap1f1b.plan.search import found_orders

__all__ = [
    "EXCHANGED",
    "MOVES",
    "OF_PARAMETERS",
    "OWN_AGAIN",
    "RECOMPUTES",
    "RESOURCE_OF",
    "About",
    "ActionRange",
    "BlockShape",
    "Budget",
    "Chains",
    "CostKey",
    "Held",
    "Label",
    "Node",
    "NodeCosts",
    "NodeRange",
    "Op",
    "Overlap",
    "Place",
    "Plan",
    "Recompute",
    "Resource",
    "Span",
    "StageShape",
    "StepRange",
    "awaited_by",
    "balanced",
    "bound",
    "choices",
    "compile",
    "cost_key",
    "exchanged_bytes",
    "fastest",
    "found_orders",
    "leaving",
    "offloaded",
    "parse_node",
    "parse_overlap",
    "parse_parts",
    "parse_range",
    "parse_recompute",
    "peer_of",
    "pipeline_bound",
    "play_clocks",
    "play_ranks",
    "row_bytes",
    "rows_per_token",
    "segments_of",
    "with_rendezvous",
]
