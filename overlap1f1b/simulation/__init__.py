"""Floor ``simulation``: what a plan would cost. Pure Python, no torch."""

from overlap1f1b.simulation.timeline import Timeline, intersection, length, simulate, union

__all__ = ["Timeline", "intersection", "length", "simulate", "union"]
