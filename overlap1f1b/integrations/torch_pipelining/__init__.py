"""Schedules of torch.distributed.pipelining, whose compute the engine plays."""

from overlap1f1b.integrations.torch_pipelining.registration import Registration, register

__all__ = ["Registration", "register"]
