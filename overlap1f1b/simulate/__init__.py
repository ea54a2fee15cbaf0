"""Floor ``simulate``: what a plan would cost. Pure Python, no torch."""

from overlap1f1b.simulate.timeline import Timeline, intersection, length, simulate, union

__all__ = ["Timeline", "intersection", "length", "simulate", "union"]
