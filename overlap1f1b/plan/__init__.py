"""Floor ``plan``: sub-op nodes of every action, and the order in which a rank issues them. Pure Python, no torch."""

from overlap1f1b.plan.chains import Chains
from overlap1f1b.plan.checks import check
from overlap1f1b.plan.clock import Span, play_ranks
from overlap1f1b.plan.compiler import compile
from overlap1f1b.plan.costs import CostKey, NodeCosts, cost_key
from overlap1f1b.plan.node import (
    LANE_OF,
    RECOMPUTES,
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
from overlap1f1b.plan.recompute import Recompute, parse_recompute

__all__ = [
    "LANE_OF",
    "RECOMPUTES",
    "BlockShape",
    "Chains",
    "CostKey",
    "Lane",
    "Node",
    "NodeCosts",
    "Op",
    "Overlap",
    "Plan",
    "Recompute",
    "Span",
    "StageShape",
    "backward_chain",
    "check",
    "compile",
    "cost_key",
    "forward_chain",
    "parse_overlap",
    "parse_recompute",
    "play_ranks",
    "weight_node",
]
