"""torchtitan's trainer on CPUs. Only in a process of its own: what it asks of a GPU is replaced there for good."""

import importlib.machinery
import sys
import time
from copy import copy
from functools import cache
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch._utils
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

NEEDED = ("torchtitan", "spmd_types", "torchdata", "tyro", "tokenizers", "tensorboard")
MISSING = [name for name in NEEDED if find_spec(name) is None]
REASON = f"{', '.join(MISSING)} not installed"


def install() -> None:
    """Replace what torchtitan 0.3.0 needs and CPUs, gloo, or torch 2.13 do not have."""
    if "torchtitan.tools.utils" in sys.modules:
        return
    # 1. The device: torchtitan looks for an accelerator at its import, and asks for its name and memory.
    torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[assignment]
    from torchtitan.tools import utils

    utils.device_module = _Device()  # type: ignore[assignment]
    # 2. Data sets: they are imported by the trainer and not used here.
    absent = {"datasets.distributed": ["split_dataset_by_node"], "datasets": ["Dataset", "load_dataset"]}
    for name, values in absent.items() if find_spec("datasets") is None else ():
        module = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__dict__.update(dict.fromkeys(values))
        sys.modules[name] = module
    # 3. Newer torch: the limit of a group is set by another name.
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = lambda timeout, group: None  # type: ignore[attr-defined]


def install_trainer() -> None:
    """Replace what torchtitan's trainer needs besides."""
    install()
    with patch("torch.compile", lambda function=None, **_: function):  # which would import its compiler, for seconds
        from torchtitan import trainer
        from torchtitan.distributed import fsdp
        from torchtitan.models.common import attention

    # 4. Flex attention has no backward on a CPU. The dense one in its place reads a mask's function alone.
    attention.FlexAttention._compiled_flex_attn = staticmethod(_dense_attention)
    attention._compiled_create_block_mask = _block_mask
    # 5. FSDP2 sums and divides in one on NCCL alone.
    divides = fsdp.disable_fsdp_gradient_division

    def sums(model: nn.Module) -> None:
        divides(model)
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    if divides.__module__ != __name__:
        fsdp.disable_fsdp_gradient_division = sums
    # 6. At its end the trainer sleeps.
    trainer.time = SimpleNamespace(sleep=lambda seconds: None, perf_counter=time.perf_counter)  # type: ignore[assignment]


class _Device:
    """``torch.cpu``, with what torchtitan asks of a device."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device: Any) -> str:
        return "cpu"

    def get_device_properties(self, device: Any) -> Any:
        return SimpleNamespace(total_memory=1 << 30)

    def memory_stats(self, device: Any) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass


@cache
def _first_mask(batch: int | None, heads: int | None, queries: int, keys: int) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask, noop_mask

    return create_block_mask(noop_mask, batch, heads, queries, keys, device="cpu")


def _block_mask(function: Any, batch: int | None, heads: int | None, queries: int, keys: int, **_: Any) -> Any:
    """Return a mask with this function, and with the blocks of one that hides nothing: finding them takes 40 ms."""
    mask = copy(_first_mask(batch, heads, queries, keys))
    mask.mask_mod = function
    return mask


def _dense_attention(
    q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any, scale: float | None, enable_gqa: bool, **_: Any
) -> tuple[Tensor, Any]:
    from torch.nn.attention.flex_attention import AuxOutput

    mask = block_mask.__dict__.get("dense")  # the same for all layers
    if mask is None:
        places = torch.meshgrid(*map(torch.arange, (len(q), 1, q.shape[2], k.shape[2])), indexing="ij")
        mask = block_mask.dense = block_mask.mask_mod(*places)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
    return out, AuxOutput(lse=None)
