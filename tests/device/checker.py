"""Whether every access to a device's memory is ordered after its producer, and before its memory's next user.

:class:`Watching` writes down the memory that every kernel and transfer reads and writes, and when memory is freed.
:func:`races` follows what was written with a clock for each stream: a stream knows what is before it on the same
stream, before an event that it has waited for, and before what the host had waited for when it gave the operation.
Nothing else orders anything, however long it took in the play that was written down.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tests.device.model import Entry

HOST = "host"


class Access(NamedTuple):
    """Bytes of a tensor's memory that an operation reads or writes."""

    memory: int
    start: int
    end: int
    writes: bool


class Memories:
    """The memory of all tensors that a rank has used, by numbers that are not used again."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, int, int]] = {}
        self._count = 0
        self.host: set[int] = set()
        """Memory of the host."""

    def access(self, tensor: Tensor, *, writes: bool) -> Access:
        """Return the access to a tensor."""
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is None:
            self._count += 1
            known = self._known[storage._cdata] = StorageWeakRef(storage), self._count, storage.nbytes()
        size = tensor.element_size()
        start = tensor.storage_offset() * size
        reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        return Access(known[1], start, start + (reach * size if tensor.numel() else 0), writes)

    def freed(self) -> list[int]:
        """Return the memory that was freed since the last call, that of storages which have become smaller included."""
        gone = []
        for key, (reference, number, size) in self._known.items():
            storage: Any = torch.UntypedStorage._new_with_weak_ptr(key)
            if storage is None or storage.nbytes() < size:
                gone.append(key)
            else:
                self._known[key] = reference, number, storage.nbytes()
        return [self._known.pop(key)[1] for key in gone]


class Watching(TorchDispatchMode):
    """Writes down every operation of torch that a rank's thread runs, as a kernel on its current stream."""

    def __init__(self, rank: Any) -> None:
        super().__init__()
        self.rank = rank

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rank = self.rank
        if rank.memories is None or rank.quiet:
            return func(*args, **kwargs)
        schema = func._schema
        given = [*zip(schema.arguments, args, strict=False)]
        given += [(spec, kwargs[spec.name]) for spec in schema.arguments if spec.name in kwargs]
        accesses = [
            rank.memories.access(tensor, writes=bool(spec.alias_info and spec.alias_info.is_write))
            for spec, value in given
            for tensor in tree_iter(value)
            if isinstance(tensor, Tensor)
        ]
        result = func(*args, **kwargs)
        views = all(spec.alias_info is not None for spec in schema.returns) and schema.returns
        if views and not any(access.writes for access in accesses):
            return result  # a view touches no memory
        made = [rank.memories.access(t, writes=True) for t in tree_iter(result) if isinstance(t, Tensor)]
        host = rank.memories.host
        if rank.current is rank.compute and any(access.memory in host for access in accesses):
            host.update(access.memory for access in made)
            rank.write("host", f"the host in {func}", [*accesses, *made])
        else:
            rank.write("kernel", rank.current.place, str(func), [*accesses, *made])
        return result


class Race(NamedTuple):
    """Two operations on the same memory that nothing orders, or memory that was freed before an operation's end."""

    rank: int
    node: str
    what: str
    earlier: str


Clock = dict[Any, int]


@dataclass
class _Uses:
    """What has used a memory: by stream and bytes, the last access."""

    pool: Any
    after: Any = None  # stream whose work so far ends before the memory is used again
    accesses: dict[tuple[Any, int, int, bool], tuple[int, str]] = field(default_factory=dict)


def races(rank: int, log: Iterable[Entry]) -> list[Race]:
    """Return what is not ordered in a rank's log."""
    follower = _Follower(rank)
    return [race for entry in log for race in follower.races(entry)]


class _Follower:
    """Follows a rank's log with a clock for each stream and for the host."""

    def __init__(self, rank: int) -> None:
        self.rank, self.node = rank, "before the first node"
        self.clocks: dict[Any, Clock] = {HOST: {}}
        self.events: dict[int, Clock] = {}
        self.uses: dict[int, _Uses] = {}

    def races(self, entry: Entry) -> Iterator[Race]:
        """Take the next entry, and yield what it breaks."""
        kind, args = entry
        host = self.clocks[HOST]
        if kind == "node":
            self.node = args[0]
        elif kind == "block":
            _join(host, self.events.get(args[0], {}))
        elif kind == "sync":
            for clock in list(self.clocks.values()):
                _join(host, clock)
        elif kind == "frees":
            self.uses[args[1]].after = args[0][0]
        elif kind == "free":
            yield from self._freed(args[0])
        elif kind == "wait":
            _join(self._clock(args[0][0]), self.events[args[1]])
        elif kind == "record":
            self.events[args[1]] = dict(self._clock(args[0][0]))
        elif kind in ("comm", "kernel", "host"):
            yield from self._used(HOST if kind == "host" else args[0][0], *args[-2:])

    def _clock(self, stream: Any) -> Clock:
        """Return the clock of a stream, which knows what the host knows."""
        clock = self.clocks.setdefault(stream, {})
        _join(clock, self.clocks[HOST])
        return clock

    def _used(self, stream: Any, what: str, accesses: Iterable[Access]) -> Iterator[Race]:
        clock = self._clock(stream)
        tick = clock[stream] = clock.get(stream, 0) + 1
        for access in accesses:
            used = self.uses.setdefault(access.memory, _Uses(stream))
            earlier = _unordered(used, access, stream, clock)
            if earlier is not None:
                yield Race(self.rank, self.node, f"{what} on stream {stream}", earlier)
            used.accesses[stream, access.start, access.end, access.writes] = tick, what

    def _freed(self, memory: int) -> Iterator[Race]:
        used = self.uses.pop(memory, None)
        if used is None:
            return
        knows = dict(self._clock(used.pool))
        if used.after is not None:
            _join(knows, self._clock(used.after))
        for (stream, *_), (tick, what) in used.accesses.items():
            if used.pool == HOST and what.startswith("aten.copy_"):
                continue  # torch notes the copies from and to pinned memory, and gives it to nobody before their end
            if stream not in (used.pool, HOST) and knows.get(stream, 0) < tick:
                yield Race(self.rank, self.node, f"freed for stream {used.pool}", f"{what} on stream {stream}")


def _unordered(used: _Uses, access: Access, stream: Any, clock: Clock) -> str | None:
    for (other, start, end, writes), (tick, what) in used.accesses.items():
        overlap = start < access.end and access.start < end
        if other != stream and overlap and (writes or access.writes) and clock.get(other, 0) < tick:
            return f"{what} on stream {other}"
    return None


def _join(clock: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        if clock.get(stream, 0) < tick:
            clock[stream] = tick


@contextmanager
def quiet(rank: Any) -> Iterator[None]:
    """Write nothing down of what the stand-in does itself."""
    before, rank.quiet = rank.quiet, True
    try:
        yield
    finally:
        rank.quiet = before


def host_memory(rank: Any, like: Tensor) -> Tensor:
    """Return an empty tensor of the host."""
    with quiet(rank):
        tensor = torch.empty_like(like)
    if rank.memories is not None:
        rank.memories.host.add(rank.memories.access(tensor, writes=True).memory)
        rank.write("host", "the host makes", rank.accesses(writes=tensor))
    return tensor
