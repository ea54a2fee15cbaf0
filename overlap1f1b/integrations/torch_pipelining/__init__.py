"""Schedules of torch.distributed.pipelining, played by the engine."""

from overlap1f1b.integrations.torch_pipelining.schedule import Schedule, overlapped

__all__ = ["Schedule", "overlapped"]
