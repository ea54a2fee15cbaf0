"""Process groups that end when their last reference goes."""

import hashlib
import os
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from overlap1f1b.transport.failures import LostRankError, headline
from overlap1f1b.transport.limits import ABORT_S, FREED_S, PROBE_S, WATCHDOG_FACTOR

T = TypeVar("T")
Group = dist.ProcessGroup

_ABORT_TAG = 2**31 - 1 - 64  # beyond the tags of a plan's nodes


class Groups:
    """Factory of process groups, each with its own queue: everything that one user of transfers needs.

    >>> groups = Groups(dist.get_process_group_ranks(mesh.get_group("ep")))
    >>> up, down, counts = (groups.new([0, 1], purpose) for purpose in ("up", "down", "counts"))

    The groups are not registered with ``torch.distributed``. Registered groups stay until all are destroyed, and find
    each other only if every rank holds equally many. The groups of this factory find each other by name, have the
    engine's limit, and end with :meth:`close` or with their last user. They have the methods of a ``ProcessGroup``
    (``send``, ``recv``, ``allreduce``, …), but the functions of ``torch.distributed`` do not know their ranks.

    On gloo they share one thread for their connections. On NCCL a group makes its communicator in its first transfer,
    which blocks the thread until all of its ranks come: :meth:`warm_up` makes all, before the first step.

    Each of these ranks of the default group must use the same ``Groups`` of them in the same order: so they agree on a
    ``name``, which no others have, without waiting for each other. ``timeout`` limits every wait, by default as the
    default group's; ``device`` is the type of the device whose tensors the groups carry.
    """

    def __init__(self, ranks: Sequence[int], timeout: timedelta | None = None, *, device: str = "cpu") -> None:
        self.timeout, self._kind, self._ranks = timeout, device, sorted(ranks)
        self._made: dict[str, tuple[Group, bool | None]] = {}  # each with `sends`

    @cached_property
    def name(self) -> str:
        """Begin of the names of the groups in the default group's store."""
        every = "-".join(map(str, self._ranks))
        place = every if len(self._ranks) <= 16 else hashlib.sha256(every.encode()).hexdigest()[:32]
        number = dist.distributed_c10d._get_default_store().add(f"overlap1f1b/made/{place}/{dist.get_rank()}", 1)
        return f"{place}/{number}"

    @cached_property
    def backend(self) -> str:
        """Backend of groups that carry the device's tensors: the default group's."""
        return backend_of(None, self._kind)

    @cached_property
    def _devices(self) -> list[Any]:
        # gloo's, for the interfaces that torch's own groups would use.
        create: Any = dist.ProcessGroupGloo
        return [create.create_device(interface=name) for name in _interfaces()] or [create.create_default_device()]

    def new(
        self,
        ranks: Sequence[int],
        purpose: str,
        *,
        ctas: int | None = None,
        gloo: bool = False,
        sends: bool | None = None,
    ) -> Group:
        """Return a new group of ``ranks`` of the default group, all of which must call this; they are sorted.

        The ``purpose`` is a name that no other group of these ranks has; ``ctas`` limits the thread blocks of a
        transfer on a GPU; ``gloo`` asks for it on any device. ``sends`` says whether this rank sends to the only other
        rank or receives from it, None for collectives: NCCL connects each direction by itself.

        LostRankError if on gloo one of the ranks did not call this within the limit.
        """
        ranks = sorted(ranks)
        name = f"overlap1f1b/{self.name}/{purpose}/{'-'.join(map(str, ranks))}/"
        store = dist.distributed_c10d.PrefixStore(name, dist.distributed_c10d._get_default_store())
        rank = ranks.index(dist.get_rank())
        if not gloo and self.backend != "gloo":
            group = self._on_device(store, rank, ranks, name, ctas)
        else:
            backend: Any = dist.ProcessGroupGloo
            options = backend._Options()
            options._devices, options._threads = self._devices, 1
            if self.timeout is not None:
                options._timeout = self.timeout
            try:
                group = backend(store, rank, len(ranks), options)
            except RuntimeError as error:
                raise LostRankError(f"ranks {ranks} did not meet in group {purpose!r}: {headline(error)}") from error
        self._made[name] = group, sends
        return group

    def _on_device(self, store: Any, rank: int, ranks: Sequence[int], name: str, ctas: int | None) -> Group:
        """Return a group that carries the device's tensors, as ``dist.new_group`` would make it."""
        made: Any
        known, backend = dist.ProcessGroup.BackendType.CUSTOM, self.backend
        timeout = self.timeout or dist.distributed_c10d.default_pg_timeout
        plugin = dist.Backend._plugins.get(backend.upper())
        if backend == "nccl":
            options = nccl_options(ctas)
            options._timeout = WATCHDOG_FACTOR * timeout
            options.global_ranks_in_group, options.group_name = list(ranks), name
            made, known = dist.ProcessGroupNCCL(store, rank, len(ranks), options), dist.ProcessGroup.BackendType.NCCL
            made._set_sequence_number_for_group()
        elif plugin is not None and not plugin.extended_api:
            made = plugin.creator_fn(store, rank, len(ranks), timeout)
        else:
            raise ValueError(
                f"groups of backend {backend!r} for {self._kind!r}; allowed: gloo, nccl, one registered with torch"
            )
        if isinstance(made, dist.ProcessGroup):
            return made
        group = dist.ProcessGroup(store, rank, len(ranks))
        group._set_default_backend(known)
        group._register_backend(torch.device(self._kind), known, made)
        return group

    def warm_up(self, device: torch.device) -> None:
        """Make the communicators of all groups that carry the device's tensors, each by a transfer of its kind.

        All ranks must call this. They take the groups in the order of their names, so that no rank waits for one that
        waits for another group.
        """
        one = torch.zeros(1, device=device)
        for group, sends in self._in_order():
            if isinstance(group, dist.ProcessGroupGloo):  # it has its connections
                continue
            if sends is None:
                group.allreduce([one]).wait()
            else:
                (group.send if sends else group.recv)([one], 1 - group.rank(), 0).wait()

    def _in_order(self) -> list[tuple[Group, bool | None]]:
        return [made for _, made in sorted(self._made.items())]

    def close(self) -> None:
        """End all groups in one order, after everything that they carry has ended; all ranks must call this."""
        for group, _ in self._in_order():
            close(group)
        self._made.clear()

    def release(self) -> None:
        """End the groups on a device at once, whatever other ranks do; on gloo they end with their last user."""
        made = [group for group, _ in self._in_order() if not isinstance(group, dist.ProcessGroupGloo)]
        side_by_side([group.abort for group in made])
        free_later(made)

    def abort(self) -> None:
        """End every transfer of the groups, see :func:`abort`."""
        self.release()
        for group, _ in self._in_order():
            if isinstance(group, dist.ProcessGroupGloo):
                abort(group)


def side_by_side(ends: Sequence[Callable[[], object]]) -> None:
    """Abort groups on a device in threads of their own, and wait at most :data:`ABORT_S` for them.

    NCCL's abort of one group may wait for a kernel that only the abort of another one ends. An abort that fails, too,
    must not hide the failure that it follows.
    """

    def quietly(end: Callable[[], object]) -> None:
        with suppress(Exception):
            end()

    if len(ends) == 1:
        quietly(ends[0])
        return
    threads = [threading.Thread(target=quietly, args=(end,), daemon=True) for end in ends]
    for thread, end in zip(threads, ends, strict=True):
        try:
            thread.start()
        except RuntimeError:  # at the end of the interpreter
            quietly(end)
    deadline = time.monotonic() + ABORT_S
    for thread in threads:
        if thread.ident is not None:
            thread.join(max(0.0, deadline - time.monotonic()))


def free_later(aborted: Sequence[Group]) -> None:
    """Free aborted groups in a thread, later.

    After an abort torch's thread beside a group on NCCL sleeps, so that flight recorders can be written: four times
    ``TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC``, by default a minute. Whoever frees the group waits for this thread.
    """
    seconds = FREED_S + 4e-3 * float(os.environ.get("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC") or 15_000)
    if aborted:
        timer = threading.Timer(seconds, list(aborted).clear)
        timer.name, timer.daemon = "overlap1f1b-frees", True
        with suppress(RuntimeError):  # there are too many threads now
            timer.start()


def close(group: Group) -> None:
    """End a group of :class:`Groups` on a device; all of its ranks must call this. One on gloo ends with its user."""
    if not isinstance(group, dist.ProcessGroupGloo) and not _registered(group):
        group.shutdown()


def _registered(group: Group) -> bool:
    return group in dist.distributed_c10d._world.pg_map


def backend_of(group: Group | None, device: torch.device | str = "cpu") -> str:
    """Return the backend, as "gloo", of a group (None: the default group) for tensors of a device, else ValueError.

    ``dist.get_backend`` returns "undefined" for groups that ``init_device_mesh`` made without ``init_process_group``.
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


def limit(group: Group, timeout: timedelta) -> None:
    """Set the limit of every wait of a registered group; on NCCL its watchdog's, which comes later."""
    watched = "nccl" in dist.get_backend_config(group)
    dist.distributed_c10d._set_pg_timeout(WATCHDOG_FACTOR * timeout if watched else timeout, group)


def abort(group: Group) -> None:
    """End every transfer of a group on gloo, here and, since its connections close, on its other ranks.

    gloo has no call for this, but it closes all connections of a group when one wait times out. Registered groups of
    other backends are left alone: they are the user's.
    """
    gloo: Any = group
    if not isinstance(group, dist.ProcessGroupGloo):
        if not _registered(group):
            group.abort()
            free_later([group])
            return
        if "cpu:gloo" not in dist.get_backend_config(group):
            return
        gloo = group._get_backend(torch.device("cpu"))
    other = (gloo.rank() + 1) % gloo.size()
    for context in range(len(_interfaces()) or 1):  # gloo has one context for each interface; the tag chooses it
        with suppress(RuntimeError):
            gloo.recv([torch.empty(1, device="cpu")], other, _ABORT_TAG + context).wait(timedelta(seconds=PROBE_S))


def users_aborts(device: torch.device) -> list[Callable[[], object]]:
    """Return what ends the transfers of each of torch's registered groups, which are the user's, on a device."""
    aborts: list[Callable[[], object]] = []
    for group in list(dist.distributed_c10d._world.pg_map):
        with suppress(RuntimeError):  # it has no backend for this device
            backend: Any = group._get_backend(device)
            if not isinstance(backend, dist.ProcessGroupGloo):
                aborts.append(backend.abort)
    return aborts


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


def collectives_begun() -> dict[tuple[int, ...], int]:
    """Return how many collectives this rank has begun in torch's process groups, by the ranks that take part."""
    begun = Counter[tuple[int, ...]]()
    known: Any = dist.distributed_c10d if dist.is_initialized() else None
    for group in () if known is None else known._world.pg_names:
        with suppress(RuntimeError):  # of a backend that does not count them
            begun[tuple(dist.get_process_group_ranks(group))] += group._get_sequence_number_for_group()
    return begun


def gathered(ranks: Sequence[int], value: T, timeout: timedelta) -> list[T]:
    """Return the values of ``ranks`` of the default group, in this order; RuntimeError if one does not call in time."""
    return gather_objects(Groups(ranks, timeout).new(ranks, "values", gloo=True), ranks, value)


def gather_objects(group: Group, ranks: Sequence[int], value: T) -> list[T]:
    """Return the picklable values of the ranks of a group on gloo, in the order of ``ranks``."""
    mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = [int(size) for size in _gather(group, torch.tensor([len(mine)], device="cpu"))]
    padded = torch.cat([mine, mine.new_zeros(max(sizes) - len(mine))])
    parts = zip(_gather(group, padded), sizes, strict=True)
    values = [pickle.loads(part[:size].numpy().tobytes()) for part, size in parts]
    return [values[sorted(ranks).index(rank)] for rank in ranks]


def _gather(group: Group, mine: torch.Tensor) -> list[torch.Tensor]:
    every = [torch.empty_like(mine) for _ in range(group.size())]
    group.allgather([every], [mine]).wait()
    return every
