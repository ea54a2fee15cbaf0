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
        "engine": "DeviceOptions Engine EngineOptions Profile Stage StepResult carried "
        "combined_forward_backward_step consolidate declare load_checkpoint save_checkpoint",
        "plan": "NodeCosts Plan compile found_orders",
        "schedule": "Action Pair Placement Program build_schedule",
        "simulation": "Costs PlanTimeline ProgramTimeline Timeline simulate",
        "transport.calls": "exchange",
    }.items()
    for name in names.split()
}

if TYPE_CHECKING:
    from overlap1f1b import integrations as integrations
    from overlap1f1b.engine import (
        DeviceOptions,
        Engine,
        EngineOptions,
        Profile,
        Stage,
        StepResult,
        carried,
        combined_forward_backward_step,
        consolidate,
        declare,
        load_checkpoint,
        save_checkpoint,
    )
    from overlap1f1b.plan import NodeCosts, Plan, compile, found_orders
    from overlap1f1b.schedule import Action, Pair, Placement, Program, build_schedule
    from overlap1f1b.simulation import Costs, PlanTimeline, ProgramTimeline, Timeline, simulate
    from overlap1f1b.transport.calls import exchange

__all__ = [
    "Action",
    "Costs",
    "DeviceOptions",
    "Engine",
    "EngineOptions",
    "NodeCosts",
    "Pair",
    "Placement",
    "Plan",
    "PlanTimeline",
    "Profile",
    "Program",
    "ProgramTimeline",
    "Stage",
    "StepResult",
    "Timeline",
    "build_schedule",
    "carried",
    "combined_forward_backward_step",
    "compile",
    "consolidate",
    "declare",
    "exchange",
    "found_orders",
    "load_checkpoint",
    "save_checkpoint",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name == "integrations":  # a floor of its own, which loads nothing by itself
        return importlib.import_module("overlap1f1b.integrations")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'overlap1f1b' has no attribute {name!r}")
    return getattr(importlib.import_module(f"overlap1f1b.{home}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "integrations"])
