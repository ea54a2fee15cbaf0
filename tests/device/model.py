"""Streams, events, communicators and hardware queues as a model in which a hang is a fact, not a time limit.

The host of each rank gives its entries to its device in order. Nothing takes time, and whatever can happen happens. A
condition that is true stays true, so the order in which the ranks are looked at makes no difference, and what is left
when nothing can move waits for ever.

- A stream runs its operations in order. An operation of a communicator occupies its stream from its start, until the
  operation of every other rank has started, too.
- A communicator has one operation at a time on each rank, in the order of launch.
- A hardware queue holds the operations of its streams in the order of launch; what cannot start blocks all behind it.
- A device-wide sync blocks the host until everything on its device has ended.
- A communicator that is made by its first operation blocks the host until all its ranks make it.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Entry(NamedTuple):
    """What a host does.

    Of its device: ``kernel`` (stream, name, accesses), ``record`` and ``wait`` (stream, event), ``comm`` (stream,
    communicator, meeting, number of ranks, name, accesses). A stream or communicator is a pair: where communicators are
    lazy, and where they are eager.

    By itself: ``node`` (name) and ``free`` (memory) are notes, ``host`` (name, accesses) an access to host memory. It
    blocks in ``block`` (event), ``sync``, ``create`` (communicator, number of ranks), ``meet`` (key, number of ranks).
    """

    kind: str
    args: tuple[Any, ...]


_QUEUED = ("kernel", "record", "wait", "comm")


class Setting(NamedTuple):
    """What a play varies."""

    lazy: bool = True  # whether first operations make communicators, and transfers of two ranks have their own
    queue_of: Callable[[int, Hashable], Hashable] | None = None  # hardware queue of a stream; by default its own
    sync_at: Callable[[int, int], bool] | None = None  # whether the host waits before a node, by rank and position


@dataclass
class _Device:
    entries: Sequence[Entry]
    at: int = 0
    nodes: int = 0
    name: str = "nothing"
    queues: dict[Hashable, deque[Entry]] = field(default_factory=lambda: defaultdict(deque))
    busy: dict[Hashable, Any] = field(default_factory=dict)  # the meeting that occupies a stream
    working: dict[Hashable, Any] = field(default_factory=dict)  # the meeting that occupies a communicator
    done: set[Hashable] = field(default_factory=set)  # events
    waits: str = ""

    @property
    def idle(self) -> bool:
        return not self.busy and not any(self.queues.values())


class Stuck(NamedTuple):
    """A rank that never ends: what it was playing, and what its host or device waits for."""

    rank: int
    node: str
    waits: str


class Play:
    """A play of what all ranks have written down."""

    def __init__(self, logs: Sequence[Sequence[Entry]], setting: Setting | None = None) -> None:
        self.setting = setting or Setting()
        self.devices = [_Device(log) for log in logs]
        self.started: dict[Hashable, set[int]] = defaultdict(set)  # ranks that have started an operation
        self.met: dict[Hashable, set[int]] = defaultdict(set)  # ranks whose hosts have come

    def run(self) -> list[Stuck]:
        """Play to the end; return the ranks that never end."""
        moved = True
        while moved:
            moved = False
            for rank, device in enumerate(self.devices):
                while self._host(rank, device) | self._streams(rank, device):
                    moved = True
        return [
            Stuck(rank, device.name, device.waits or self._heads(device))
            for rank, device in enumerate(self.devices)
            if device.at < len(device.entries) or not device.idle
        ]

    def _heads(self, device: _Device) -> str:
        heads = [queue[0] for queue in device.queues.values() if queue]
        return f"streams: {heads[:3]}, transfers: {list(device.busy.values())[:3]}"

    def _pick(self, pair: Any) -> Any:
        return pair[0 if self.setting.lazy else 1]

    def _host(self, rank: int, device: _Device) -> bool:
        moved = False
        while device.at < len(device.entries):
            entry = device.entries[device.at]
            device.waits = self._blocks(rank, device, entry)
            if device.waits:
                return moved
            if entry.kind in _QUEUED:
                stream = self._pick(entry.args[0])
                queue = stream if self.setting.queue_of is None else self.setting.queue_of(rank, stream)
                device.queues[queue].append(entry)
            device.at += 1
            moved = True
        return moved

    def _blocks(self, rank: int, device: _Device, entry: Entry) -> str:
        """Return what blocks the host here; empty if nothing does."""
        kind, args = entry
        if kind == "node":
            device.name = args[0]
            sync = self.setting.sync_at
            if sync is not None and sync(rank, device.nodes) and not device.idle:
                return "a device-wide sync"
            device.nodes += 1
        elif kind == "sync":
            return "" if device.idle else "a device-wide sync"
        elif kind == "block":
            return "" if args[0] in device.done else f"event {args[0]}"
        elif kind == "meet" or (kind == "create" and self.setting.lazy):
            key, ranks = args
            self.met[kind, key].add(rank)
            return "" if len(self.met[kind, key]) == ranks else f"others, to {kind} {key}"
        return ""

    def _streams(self, rank: int, device: _Device) -> bool:
        moved = False
        for queue in list(device.queues.values()):
            while queue and self._begins(rank, device, queue[0]):
                queue.popleft()
                moved = True
        return moved

    def _begins(self, rank: int, device: _Device, entry: Entry) -> bool:
        kind, args = entry
        stream = self._pick(args[0])
        if stream in device.busy:
            return False
        if kind == "wait" and args[1] not in device.done:
            return False
        if kind == "comm":
            communicator, meeting, ranks = self._pick(args[1]), args[2], args[3]
            if communicator in device.working:
                return False
            device.busy[stream] = device.working[communicator] = meeting
            self.started[meeting].add(rank)
            if len(self.started[meeting]) == ranks:
                for other in self.devices:
                    for held in (other.busy, other.working):
                        for key in [key for key, value in held.items() if value == meeting]:
                            del held[key]
        elif kind == "record":
            device.done.add(args[1])
        return True


def hangs(logs: Sequence[Sequence[Entry]], setting: Setting | None = None) -> list[Stuck]:
    """Return the ranks that never end."""
    return Play(logs, setting).run()


def nodes_of(log: Iterable[Entry]) -> int:
    """Return the number of nodes that a host has played."""
    return sum(entry.kind == "node" for entry in log)
