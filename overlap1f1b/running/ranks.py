"""The process group of a rank, started by this program or by torchrun."""

from __future__ import annotations

import ctypes
import math
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from overlap1f1b.running.launch import STORE, end_with_agent, under_torchrun
from overlap1f1b.transport import devices
from overlap1f1b.transport.failures import LostRankError, is_loss


@dataclass(frozen=True)
class Rank:
    """This process among all ranks; ``mesh`` has the dimensions "pp", "dp" and "ep", and is None for a single rank."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that share this rank's experts; None if there are no others."""
        return None if self.mesh is None or self.mesh["ep"].size() == 1 else self.mesh.get_group("ep")

    @property
    def local(self) -> bool:
        """Whether all ranks are processors of this machine."""
        return self.device.type == "cpu" and int(os.environ.get("LOCAL_WORLD_SIZE", self.size)) == self.size

    @property
    def data_rank(self) -> int:
        """Number of this rank among the ranks that read different data."""
        return self.rank % self.data_ranks

    @property
    def data_ranks(self) -> int:
        """Number of ranks that read different data; the ranks of one pipeline read the same."""
        return 1 if self.mesh is None else self.mesh["dp"].size() * self.mesh["ep"].size()


class NotJoinedError(RuntimeError):
    """The other ranks did not come within the limit."""


@contextmanager
def joined(shape: tuple[int, int, int], timeout: float) -> Iterator[Rank]:
    """Join the ranks that :func:`~overlap1f1b.running.launch.run_ranks` or torchrun started, or be the only rank.

    ``shape`` are ranks along "pp", "dp" and "ep" (ValueError if there are not as many), ``timeout`` the limit of every
    wait in seconds: NotJoinedError if the others do not come within it.
    """
    _keep_heap()
    store_path = os.environ.get(STORE)
    size = int(os.environ["WORLD_SIZE"]) if store_path or under_torchrun() else 1
    if size != math.prod(shape):
        pp, dp, ep = shape
        raise ValueError(f"{size} ranks for --pp {pp} --dp {dp} --ep {ep}; allowed: {math.prod(shape)} ranks")
    if size == 1:
        yield Rank(0, 1, devices.present(), None)
        return
    end_with_agent()
    rank, limit = int(os.environ["RANK"]), timedelta(seconds=timeout)
    try:
        store, *_ = next(rendezvous(f"file://{store_path}" if store_path else "env://", rank, size, timeout=limit))
        store.set_timeout(limit)
        device = _device_of(store, rank, size)
        backend = dist.get_default_backend_for_device(device)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "dp", "ep"))
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and LOST.match(one_line(error)) is None:
            raise
        raise NotJoinedError(
            f"rank {rank} waited for all of {size} ranks: {one_line(error)} (--timeout {timeout:g})"
        ) from error
    try:
        yield Rank(rank, size, device, mesh)
    finally:
        dist.destroy_process_group()


def _device_of(store: Any, rank: int, size: int) -> torch.device:
    """Return this rank's device: a GPU if every rank has one of its own. All ranks must call this."""
    device, name = devices.present(), None
    gpu = devices.gpu_of(device)
    if gpu is not None:
        # A job may show a rank its own GPU alone: number 0 for every rank.
        local = int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device(device.type, local if 0 <= local < gpu.device_count() else 0)
        # NCCL takes ranks with different host names for ranks on different machines, whatever GPU they have.
        name = f"{gpu.get_device_properties(device).uuid} {os.environ.get('NCCL_HOSTID')}"
    own = ranks_with_gpu(store, size, name)
    if own == size:
        gpu.set_device(device)
        return device
    if own and rank == 0:
        sys.stderr.write(f"overlap1f1b: {own} of {size} ranks have a GPU of their own: all compute on processors\n")
    return torch.device("cpu")


def ranks_with_gpu(store: Any, size: int, gpu: str | None) -> int:
    """Return how many ranks have a GPU that no other rank has, as NCCL asks for; all ranks must call this.

    ``gpu`` names this rank's GPU as no other GPU is named; it is None without one.
    """
    if gpu is not None and store.add(f"gpu {gpu}", 1) == 1:
        store.add("ranks with a GPU", 1)
    if store.add("ranks that came", 1) == size:  # the last one knows
        store.set("all ranks", str(store.add("ranks with a GPU", 0)))
    return int(store.get("all ranks"))


SHARED = 0.1  # share of the time without a free processor from which figures are said to be of shared ones


def waited_s() -> float:
    """Return the seconds in which this process's main thread was ready, and all processors were taken; 0 off Linux."""
    try:
        return 1e-9 * int(Path("/proc/self/schedstat").read_text().split()[1])
    except (OSError, IndexError):
        return 0.0


LOST = re.compile(
    r".*?(Connection closed by peer|Connection reset by peer|Broken pipe|ncclRemoteError"
    r"|Timed out waiting \d+ms for \w+ operation to complete|[Ww]ait timeout"
    r"|Application timeout caused pair closure|Operation timed out|Timeout waiting for key)"
)
"""Messages of gloo and NCCL when another rank is gone or does not answer within ``--timeout``."""


def lost(error: Exception) -> str | None:
    """Return how the connection to another rank ended, in one line; None for other errors.

    The other rank, or the process that started it, says why it ended: a traceback from here would only hide that.
    """
    text, cause = one_line(error), error.__cause__
    if found := LOST.match(text):
        return found[0]
    others = cause is None or isinstance(cause, ConnectionError | TimeoutError) or is_loss(cause)
    return text if isinstance(error, LostRankError) and others else None


def one_line(error: Exception) -> str:
    """Return an error's text in one line, without the name of gloo's source file."""
    return re.sub(r"\[[^]]*/\S+\] ", "", " ".join(str(error).split()))


def no_room(error: RuntimeError) -> str | None:
    """Return in one line that memory, or the room of exchanges, does not suffice, and what helps; None otherwise."""
    # Not at the top: ranks of doctor run where the engine refuses this torch.
    from overlap1f1b.engine import CapacityOverflowError

    if isinstance(error, CapacityOverflowError):
        return f"{one_line(error)}; allowed: a larger --capacity"
    found = re.search(r"(can't allocate memory|out of memory)[^.]*", str(error))
    return f"{found[0]}; allowed: a smaller model, --batch or --sequence, or more --recompute" if found else None


def _keep_heap() -> None:
    """Let glibc keep freed memory: by default each step of a large model on a CPU asks for it again, page by page."""
    if sys.platform.startswith("linux"):
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            trim_threshold, mmap_threshold = -1, -3
            mallopt(mmap_threshold, 2**25)  # the largest that glibc takes
            mallopt(trim_threshold, 2**31 - 1)
