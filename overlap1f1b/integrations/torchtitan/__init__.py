"""torchtitan's pipeline schedule, played by the engine."""

from overlap1f1b.integrations.torchtitan.pipelining import SCHEDULES, pipelining_fn
from overlap1f1b.integrations.torchtitan.schedule import Schedule
from overlap1f1b.integrations.torchtitan.trainer import Overlapped

__all__ = ["SCHEDULES", "Overlapped", "Schedule", "pipelining_fn"]
