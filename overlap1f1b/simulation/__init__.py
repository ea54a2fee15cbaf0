"""Floor ``simulation``: predicted times of a program or a plan. Pure Python, no torch."""

from overlap1f1b.simulation.actions import Costs, ProgramTimeline, SlotSpan, TransferSpan, play_actions
from overlap1f1b.simulation.search import (
    ActionModel,
    Candidate,
    Model,
    NodeModel,
    Outcome,
    Played,
    Ranking,
    candidates,
    played,
    search,
)
from overlap1f1b.simulation.simulate import simulate
from overlap1f1b.simulation.timeline import OverlapFigures, PlanTimeline, Timeline, play_nodes

__all__ = [
    "ActionModel",
    "Candidate",
    "Costs",
    "Model",
    "NodeModel",
    "Outcome",
    "OverlapFigures",
    "PlanTimeline",
    "Played",
    "ProgramTimeline",
    "Ranking",
    "SlotSpan",
    "Timeline",
    "TransferSpan",
    "candidates",
    "play_actions",
    "play_nodes",
    "played",
    "search",
    "simulate",
]
