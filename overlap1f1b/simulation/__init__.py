"""Floor ``simulation``: what a program or a plan would cost. Pure Python, no torch."""

from overlap1f1b.simulation.actions import ProgramTimeline, SlotSpan, TransferSpan, play_actions
from overlap1f1b.simulation.costs import Costs
from overlap1f1b.simulation.nodes import PlanTimeline, play_nodes
from overlap1f1b.simulation.outcome import Outcome, Played, copies_of
from overlap1f1b.simulation.search import (
    ActionModel,
    Candidate,
    Model,
    NodeModel,
    Ranking,
    candidates,
    search,
)
from overlap1f1b.simulation.simulate import simulate
from overlap1f1b.simulation.timeline import Timeline, intersection, length, union

__all__ = [
    "ActionModel",
    "Candidate",
    "Costs",
    "Model",
    "NodeModel",
    "Outcome",
    "PlanTimeline",
    "Played",
    "ProgramTimeline",
    "Ranking",
    "SlotSpan",
    "Timeline",
    "TransferSpan",
    "candidates",
    "copies_of",
    "intersection",
    "length",
    "play_actions",
    "play_nodes",
    "search",
    "simulate",
    "union",
]
