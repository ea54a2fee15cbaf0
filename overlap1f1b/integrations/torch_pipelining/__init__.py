"""Schedules of torch.distributed.pipelining, played by the engine."""

from overlap1f1b.integrations.torch_pipelining.schedule import Part, Schedule, overlapped

__all__ = ["Part", "Schedule", "overlapped"]
