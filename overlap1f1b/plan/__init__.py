"""Floor ``plan``: sub-op nodes of every action, and the order in which a rank issues them. Pure Python, no torch."""

from overlap1f1b.plan.chains import Chains
from overlap1f1b.plan.checks import check
from overlap1f1b.plan.clock import Span, play_ranks
from overlap1f1b.plan.compiler import compile
from overlap1f1b.plan.costs import CostKey, NodeCosts, cost_key
from overlap1f1b.plan.node import (
    LANE_OF,
    BlockShape,
    Lane,
    Node,
    Op,
    StageShape,
    backward_chain,
    forward_chain,
    weight_node,
)
from overlap1f1b.plan.plan import Overlap, Plan, parse_overlap

__all__ = [
    "LANE_OF",
    "BlockShape",
    "Chains",
    "CostKey",
    "Lane",
    "Node",
    "NodeCosts",
    "Op",
    "Overlap",
    "Plan",
    "Span",
    "StageShape",
    "backward_chain",
    "check",
    "compile",
    "cost_key",
    "forward_chain",
    "parse_overlap",
    "play_ranks",
    "weight_node",
]
