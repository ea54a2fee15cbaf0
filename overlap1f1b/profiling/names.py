"""What the name of a kernel or copy says of it. Names tell exchange from compute where no range does."""

from __future__ import annotations

import re
from typing import Literal

Role = Literal["exchange", "compute", "copy", ""]  # what a kernel or copy does; the last if its name does not say
_LOCAL = "get_dispatch_layout|_epilogue|mask_buffer|clean_low_latency|_ht_scan_kernel"
"""Kernels of the libraries below that stay on their device: they compute."""
_EXCHANGE = (
    r"(?<![A-Za-z])(n|r|ms)ccl|\b(AllGather|AllReduce|ReduceScatter)Kernel"  # NCCL, RCCL, MSCCL, MSCCL++, NCCL 1
    r"|deep_ep::|hybrid_ep::|uccl::|mori::|\bEp(Dispatch|Combine)"  # DeepEP, HybridEP, UCCL, MORI
    r"|n?vshmem|rocshmem"
    r"|\b(alltoall|barrier|broadcast|fcollect|rdxn|reducescatter|sync)_on_stream_kernel"  # NVSHMEM's collectives
    r"|\b(one|two)_shot_all_reduce|\bmultimem_|cross_device_reduce"  # torch's symmetric memory, vLLM, SGLang, AITER
    r"|allreduce_fusion_kernel|moeA2A(Dispatch|Combine)|userbuffers_"  # TensorRT-LLM, FlashInfer, Transformer Engine
    r"|Memcpy PtoP"  # between two devices
)
_COPY = r"^Mem(cpy|set)"
_COMPUTE = (
    r"(?i)at::|aten|cutlass|cublas|cudnn|gemm|gemv|nvjet|xmma|flash|fmha|attention|conv|winograd|triton|cub::|thrust::"
    r"|rocprim|hipcub|\bck::|ck_tile|_ZN2ck|Cijk_|elementwise|reduce_kernel|softmax|norm|multi_tensor|embedding"
)
_ROLES: tuple[tuple[str, Role], ...]
_ROLES = ((_LOCAL, "compute"), (_EXCHANGE, "exchange"), (_COPY, "copy"), (_COMPUTE, "compute"))


def role_of(name: str) -> Role:
    """Return what a name says; the arguments in a demangled name count, too.

    >>> role_of("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"), role_of("Memcpy DtoH (Device -> Pinned)")
    ('exchange', 'copy')
    """
    return next((role for pattern, role in _ROLES if re.search(pattern, name)), "")


def shortened(name: str) -> str:
    """Return a name without its return type, template and arguments.

    >>> shortened("void deep_ep::intranode::dispatch<8, 768>(int4*, float*)")
    'deep_ep::intranode::dispatch'
    """
    bare = re.sub(r"\(anonymous namespace\)::|<unnamed>::|^void |^Memcpy (?=PtoP)", "", name)
    return re.split(r"[<(]|\.kd$", bare)[0].strip()[:60] or "a kernel without a name"
