"""torch.distributed.pipelining's schedules, their compute played by the engine."""

from overlap1f1b.integrations.torch_pipelining.registration import Registration, register

__all__ = ["Registration", "register"]
