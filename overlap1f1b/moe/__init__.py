"""Mixture of experts: router, experts, and the route of their rows.

Letters in shapes, here and everywhere above:

===  ==============================================
`T`  tokens of this rank
`K`  experts per token
`E`  experts, over all ranks
`R`  routed rows received by this rank
`H`  hidden size
`I`  intermediate size of an expert
`B`  batch
`S`  sequence
`V`  vocabulary
`N`  attention heads
`D`  size of a head
===  ==============================================
"""

from overlap1f1b.transport.versions import check_torch

check_torch()

from overlap1f1b.kernels.choice import Kernels, use_kernels
from overlap1f1b.moe.auxiliary import attach
from overlap1f1b.moe.experts import Experts, GroupedExperts
from overlap1f1b.moe.layer import MoE, SwiGLU
from overlap1f1b.moe.parameters import ExpertParameter, parameter_groups
from overlap1f1b.moe.router import Router, RouterConfig, set_auxiliary_scale

__all__ = [
    "ExpertParameter",
    "Experts",
    "GroupedExperts",
    "Kernels",
    "MoE",
    "Router",
    "RouterConfig",
    "SwiGLU",
    "attach",
    "parameter_groups",
    "set_auxiliary_scale",
    "use_kernels",
]
