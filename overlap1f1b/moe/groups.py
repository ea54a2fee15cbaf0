"""Process groups of one's own, which end when nobody holds them any more."""

from __future__ import annotations

import os
import pickle
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
Group = dist.ProcessGroup


class Groups:
    """Makes groups of ranks whose transfers share no queue with others.

    >>> groups = Groups.of(mesh.get_group("ep"))
    >>> up, down, counts = (groups.new([0, 1], purpose) for purpose in ("up", "down", "counts"))

    On gloo they are not registered with ``torch.distributed``: its groups stay until all are destroyed, need the same
    number of earlier groups on every rank to find each other, and run three threads each, which wake up a hundred times
    a second. These are found by their name, share one thread for their connections and go with their last user. They
    have the methods of a ``ProcessGroup`` (``send``, ``recv``, ``allreduce``, …), not the functions of
    ``torch.distributed``. On other backends they are made by ``dist.new_group``.

    Args:
        name: The same on all ranks that make groups together, and another than that of any other Groups.
        timeout: Limit of every wait; None for that of the default group.
        gloo: Whether to use gloo; None for what the default group uses.
    """

    def __init__(self, name: str, timeout: timedelta | None = None, *, gloo: bool | None = None) -> None:
        self.name, self.timeout = name, timeout
        self.gloo = dist.get_backend() == "gloo" if gloo is None else gloo
        self._devices: list[Any] = []

    @classmethod
    def of(cls, group: Group, timeout: timedelta | None = None, *, gloo: bool | None = None) -> Groups:
        """Groups for the ranks of a registered group, all of which must call this."""
        name = [uuid.uuid4().hex]
        dist.broadcast_object_list(name, group=group, group_src=0)
        return cls(name[0], timeout, gloo=gloo)

    def new(self, ranks: Sequence[int], purpose: str, *, ctas: int | None = None) -> Group:
        """A group of these ranks of the default group, all of which must call this; numbered in ascending order.

        ``ctas`` is the most blocks that one of its transfers may have on a GPU.
        """
        ranks = sorted(ranks)
        if not self.gloo:
            options = nccl_options(ctas) if dist.get_backend() == "nccl" else None
            return dist.new_group(ranks, timeout=self.timeout, pg_options=options, use_local_synchronization=True)
        backend: Any = dist.ProcessGroupGloo
        self._devices = self._devices or _devices(backend)
        options = backend._Options()
        options._devices, options._threads = self._devices, 1
        if self.timeout is not None:
            options._timeout = self.timeout
        place = f"overlap1f1b/{self.name}/{purpose}/{'-'.join(map(str, ranks))}/"
        store = dist.distributed_c10d.PrefixStore(place, dist.distributed_c10d._get_default_store())
        group: Group = backend(store, ranks.index(dist.get_rank()), len(ranks), options)
        return group


def nccl_options(ctas: int | None) -> Any:
    """NCCL's options for a group beside compute: a stream of high priority, few blocks, and a policy to spare them.

    A transfer of few blocks leaves multiprocessors to compute, and transfers of several groups fit beside each other,
    or they could wait for one another. The policy is set where torch and NCCL know it (NCCL 2.27).
    """
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options(is_high_priority_stream=True)
    if ctas is not None:
        options.config.min_ctas, options.config.max_ctas = min(ctas, 4), ctas
    policy = getattr(nccl, "NCCL_CTA_POLICY_EFFICIENCY", None)
    if policy is not None and hasattr(options.config, "cta_policy"):
        options.config.cta_policy = policy
    return options


def _devices(backend: Any) -> list[Any]:
    """The interfaces that torch's own groups would use."""
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    return [backend.create_device(interface=name) for name in names] or [backend.create_default_device()]


def gather_objects(group: Group, value: T) -> list[T]:
    """The values of all ranks, which must be picklable, by their numbers in a group on gloo."""
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
