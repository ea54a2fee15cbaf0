"""Process groups that end when their last reference goes."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from overlap1f1b.transport.limits import PROBE_S

T = TypeVar("T")
Group = dist.ProcessGroup

_ABORT_TAG = 2**31 - 1 - 64  # beyond the tags of a plan's nodes


class Groups:
    """Factory of process groups, each with its own queue.

    >>> groups = Groups(dist.get_process_group_ranks(mesh.get_group("ep")))
    >>> up, down, counts = (groups.new([0, 1], purpose) for purpose in ("up", "down", "counts"))

    On gloo the groups are not registered with ``torch.distributed``. Registered groups stay until all are destroyed,
    find each other only if every rank made the same number of groups before, and run three threads each, which wake up
    a hundred times a second. The groups of this factory find each other by name, share one thread for their
    connections, and end with their last user. They have the methods of a ``ProcessGroup`` (``send``, ``recv``,
    ``allreduce``, …), but the functions of ``torch.distributed`` do not know them. On other backends
    ``dist.new_group`` makes the groups.

    Args:
        ranks: All ranks of the default group that make groups together. Each of them must make the same ``Groups`` of
            these ranks in the same order: so they agree on a name without waiting for each other.
        timeout: Limit of every wait; None for the default group's limit.
        device: Type of the device whose tensors the groups carry.

    Attributes:
        name: Name shared by these ranks; no other ``Groups`` has it.
    """

    def __init__(self, ranks: Sequence[int], timeout: timedelta | None = None, *, device: str = "cpu") -> None:
        self.timeout, self.backend = timeout, backend_of(None, device)
        self.store = dist.distributed_c10d._get_default_store()
        every = "-".join(map(str, sorted(ranks)))
        place = every if len(ranks) <= 16 else hashlib.sha256(every.encode()).hexdigest()[:32]
        number = self.store.add(f"overlap1f1b/made/{place}/{dist.get_rank()}", 1)
        self.name = f"{place}/{number}"
        self._devices: list[Any] = []
        self._made: list[Group] = []

    def new(self, ranks: Sequence[int], purpose: str, *, ctas: int | None = None, gloo: bool = False) -> Group:
        """Return a new group of ``ranks`` of the default group, all of which must call this; they are sorted.

        Args:
            ranks: Numbers in the default group.
            purpose: Name that no other group of these ranks from this factory has.
            ctas: Largest number of thread blocks of a transfer on a GPU.
            gloo: Whether to use gloo on any device.
        """
        ranks = sorted(ranks)
        if not gloo and self.backend != "gloo":
            options = nccl_options(ctas) if self.backend == "nccl" else None
            return dist.new_group(ranks, timeout=self.timeout, pg_options=options, use_local_synchronization=True)
        backend: Any = dist.ProcessGroupGloo
        self._devices = self._devices or _devices(backend)
        options = backend._Options()
        options._devices, options._threads = self._devices, 1
        if self.timeout is not None:
            options._timeout = self.timeout
        place = f"overlap1f1b/{self.name}/{purpose}/{'-'.join(map(str, ranks))}/"
        store = dist.distributed_c10d.PrefixStore(place, self.store)
        group: Group = backend(store, ranks.index(dist.get_rank()), len(ranks), options)
        self._made.append(group)
        return group

    def abort(self) -> None:
        """End every transfer of the groups on gloo, see :func:`abort`."""
        for group in self._made:
            abort(group)


def backend_of(group: Group | None, device: torch.device | str = "cpu") -> str:
    """Return the backend of a group (None: the default group) for tensors of a device: ``"gloo"``, ``"nccl"``, …

    ``dist.get_backend`` returns "undefined" for groups that ``init_device_mesh`` made without ``init_process_group``.

    Raises:
        ValueError: The group has no backend for this device.
    """
    if isinstance(group, dist.ProcessGroupGloo):  # one of ours, which torch does not know
        return "gloo"
    kind = torch.device(device).type
    backends = dict(pair.split(":", 1) for pair in dist.get_backend_config(group).split(","))
    if kind not in backends:
        raise ValueError(
            f"a process group of backend {dist.get_backend_config(group)} for tensors on {kind!r}; "
            f"allowed: on {', '.join(map(repr, backends))}"
        )
    return backends[kind]


def abort(group: Group) -> None:
    """End every transfer of a group on gloo, here and, since its connections close, on its other ranks.

    gloo has no call for this, but it closes all connections of a group when one wait times out. Groups of other
    backends are left alone.
    """
    gloo: Any = group
    if not isinstance(group, dist.ProcessGroupGloo):
        if "cpu:gloo" not in dist.get_backend_config(group):
            return
        gloo = group._get_backend(torch.device("cpu"))
    other = (gloo.rank() + 1) % gloo.size()
    for context in range(len(_interfaces()) or 1):  # gloo has one context for each interface; the tag chooses it
        with suppress(RuntimeError):
            gloo.recv([torch.empty(1)], other, _ABORT_TAG + context).wait(timedelta(seconds=PROBE_S))


def nccl_options(ctas: int | None) -> Any:
    """Return NCCL's options for transfers beside compute: a stream of high priority and few blocks.

    Few blocks leave multiprocessors for compute, and let transfers of several groups run at once; otherwise they could
    wait for each other. The policy that spares blocks is set if torch and NCCL have it (NCCL 2.27).
    """
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options(is_high_priority_stream=True)
    if ctas is not None:
        options.config.min_ctas, options.config.max_ctas = min(ctas, 4), ctas
    policy = getattr(nccl, "NCCL_CTA_POLICY_EFFICIENCY", None)
    if policy is not None and hasattr(options.config, "cta_policy"):
        options.config.cta_policy = policy
    return options


def _interfaces() -> list[str]:
    return [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]


def _devices(backend: Any) -> list[Any]:
    """Return gloo's devices for the interfaces that torch's own groups would use."""
    return [backend.create_device(interface=name) for name in _interfaces()] or [backend.create_default_device()]


def gathered(ranks: Sequence[int], value: T, timeout: timedelta) -> list[T]:
    """Return the values of ``ranks`` of the default group, in the order given; all of these ranks must call this.

    Raises:
        RuntimeError: A rank did not call this within the limit.
    """
    values = gather_objects(Groups(ranks, timeout).new(ranks, "values", gloo=True), value)
    return [values[sorted(ranks).index(rank)] for rank in ranks]


def gather_objects(group: Group, value: T) -> list[T]:
    """Return the picklable values of all ranks of a group on gloo, by rank."""
    mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = [int(size) for size in _gather(group, torch.tensor([len(mine)]))]
    padded = torch.cat([mine, mine.new_zeros(max(sizes) - len(mine))])
    return [
        pickle.loads(part[:size].numpy().tobytes()) for part, size in zip(_gather(group, padded), sizes, strict=True)
    ]


def _gather(group: Group, mine: torch.Tensor) -> list[torch.Tensor]:
    every = [torch.empty_like(mine) for _ in range(group.size())]
    group.allgather([every], [mine]).wait()
    return every
