"""Floor ``simulation``: predicted times of programs and plans, to look at and to rank. Pure Python, no torch."""

from overlap1f1b.simulation.actions import Costs, ProgramTimeline, play_actions
from overlap1f1b.simulation.causes import CAUSES, Causes, Flown, Idle
from overlap1f1b.simulation.simulator import simulate
from overlap1f1b.simulation.timeline import OverlapFigures, PlanTimeline, Timeline, play_nodes

__all__ = [
    "CAUSES",
    "Causes",
    "Costs",
    "Flown",
    "Idle",
    "OverlapFigures",
    "PlanTimeline",
    "ProgramTimeline",
    "Timeline",
    "play_actions",
    "play_nodes",
    "simulate",
]
