"""Ranks on NCCL in processes of `tests.ranks`."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@contextmanager
def on_nccl(rank: int, size: int, *, timeout: float = 60, **shape: int) -> Iterator[tuple[DeviceMesh, torch.device]]:
    """Leave the default group on gloo for one with NCCL, and make a mesh of GPUs, of ``shape`` by dimensions.

    NCCL refuses two ranks on one GPU of one host, so each rank says that it is a host of its own. Then all that they
    send goes through sockets, and a kernel waits for the other process's turn on the GPU: slow, but NCCL's own order.
    """
    os.environ |= {"NCCL_SOCKET_IFNAME": "lo", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    if torch.cuda.device_count() < size:
        os.environ |= {"NCCL_HOSTID": f"rank {rank}", "NCCL_IB_DISABLE": "1"}
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    store = f"{_agreed(rank)}/nccl"
    dist.destroy_process_group()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=rank, world_size=size,
        timeout=timedelta(seconds=timeout),
    )  # fmt: skip
    torch.use_deterministic_algorithms(True)
    # Not in a `finally`: after a failure NCCL's own watchdog is busy for a minute, and the caller ends this process.
    yield init_device_mesh("cuda", tuple(shape.values()), mesh_dim_names=tuple(shape)), device
    torch.use_deterministic_algorithms(False)
    dist.destroy_process_group()


def _agreed(rank: int) -> Path:
    """A folder that all ranks know."""
    found: list[Any] = [tempfile.mkdtemp(prefix="nccl-") if rank == 0 else None]
    dist.broadcast_object_list(found, 0)
    return Path(found[0])
