"""Train mixture-of-experts transformers with the expert all-to-all hidden behind compute.

Names are imported when they are first used: schedules and plans never load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

_HOME = {
    name: home
    for home, names in {
        "checkpoint": "consolidate load_checkpoint save_checkpoint",
        "engine": "DeviceOptions Engine EngineOptions Stage StepResult carried combined_forward_backward_step declare",
        "plan": "NodeCosts Plan compile found_orders",
        "record": "Profile",
        "schedule": "Action Pair Placement Program build_schedule",
        "simulation": "Costs PlanTimeline ProgramTimeline Timeline simulate",
        "transport.calls": "exchange",
    }.items()
    for name in names.split()
}

__all__ = list(_HOME)

if TYPE_CHECKING:
    from overlap1f1b import integrations as integrations
    from overlap1f1b.checkpoint import consolidate as consolidate
    from overlap1f1b.checkpoint import load_checkpoint as load_checkpoint
    from overlap1f1b.checkpoint import save_checkpoint as save_checkpoint
    from overlap1f1b.engine import DeviceOptions as DeviceOptions
    from overlap1f1b.engine import Engine as Engine
    from overlap1f1b.engine import EngineOptions as EngineOptions
    from overlap1f1b.engine import Stage as Stage
    from overlap1f1b.engine import StepResult as StepResult
    from overlap1f1b.engine import carried as carried
    from overlap1f1b.engine import combined_forward_backward_step as combined_forward_backward_step
    from overlap1f1b.engine import declare as declare
    from overlap1f1b.plan import NodeCosts as NodeCosts
    from overlap1f1b.plan import Plan as Plan
    from overlap1f1b.plan import compile as compile
    from overlap1f1b.plan import found_orders as found_orders
    from overlap1f1b.record import Profile as Profile
    from overlap1f1b.schedule import Action as Action
    from overlap1f1b.schedule import Pair as Pair
    from overlap1f1b.schedule import Placement as Placement
    from overlap1f1b.schedule import Program as Program
    from overlap1f1b.schedule import build_schedule as build_schedule
    from overlap1f1b.simulation import Costs as Costs
    from overlap1f1b.simulation import PlanTimeline as PlanTimeline
    from overlap1f1b.simulation import ProgramTimeline as ProgramTimeline
    from overlap1f1b.simulation import Timeline as Timeline
    from overlap1f1b.simulation import simulate as simulate
    from overlap1f1b.transport.calls import exchange as exchange


def __getattr__(name: str) -> Any:
    if name == "integrations":  # a floor of its own, which loads nothing by itself
        return importlib.import_module("overlap1f1b.integrations")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'overlap1f1b' has no attribute {name!r}")
    return getattr(importlib.import_module(f"overlap1f1b.{home}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "integrations"])
