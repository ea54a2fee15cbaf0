"""torchtitan's pipeline schedule, played by the engine."""

from overlap1f1b.integrations.torchtitan.pipelining import SCHEDULES, pipelining_fn
from overlap1f1b.integrations.torchtitan.schedule import Schedule

__all__ = ["SCHEDULES", "Schedule", "pipelining_fn"]
