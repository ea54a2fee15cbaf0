"""Megatron-Core's pipeline schedules, played by the engine."""

from overlap1f1b.integrations.megatron.config import ProcessGroups
from overlap1f1b.integrations.megatron.forward_backward import SCHEDULES, ForwardBackward, get_forward_backward_func
from overlap1f1b.integrations.megatron.release import custom_backward, deallocate_output_tensor

__all__ = [
    "SCHEDULES",
    "ForwardBackward",
    "ProcessGroups",
    "custom_backward",
    "deallocate_output_tensor",
    "get_forward_backward_func",
]
