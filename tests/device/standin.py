"""Ranks as threads of one process, with CUDA and NCCL that write down what they are told, and deliver the tensors.

Each rank's thread is its host. A kernel runs at once, where it is queued. A transfer's tensors are taken at its launch,
and delivered when something waits for them: so a host here waits where its device would, and never longer than a
program needs whose receives take what was sent before. Whether the device, or the host, would hang is another
question, to which :mod:`tests.device.model` has the exact answer.

A transfer whose peer never answers leaves its memory as it is. Its stream and all that waits for it hang: events do not
complete, and nothing is sent. The host goes on, as with CUDA, until it asks for an event.
"""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from overlap1f1b.play.crossing import functions_cross
from overlap1f1b.play.player import Player
from overlap1f1b.transport import devices, streams
from overlap1f1b.transport.mesh import Mesh
from overlap1f1b.transport.streams import EventMark, HostCopy
from tests.device.checker import Access, Memories, Watching, host_memory, quiet
from tests.device.model import Entry

BACKEND = "standin"
STUCK_S = 30.0  # no host waits longer for tensors of a rank that is still alive

_NEVER = object()  # what a hung stream sends
_HERE = threading.local()


class Stopped(BaseException):
    """Ends the thread of a rank that the test has stopped."""


class World:
    """Ranks as threads.

    >>> world = World(4)
    >>> results = world.run(function)  # function(rank, size) on every rank
    >>> world.logs
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.ranks = [Rank(self, number) for number in range(size)]
        self.changed = threading.Condition()
        self.mail: dict[tuple[Any, ...], deque[Any]] = defaultdict(deque)
        self.lost: set[int] = set()
        """Ranks that send nothing any more."""
        self.members: dict[int, dict[int, int]] = defaultdict(dict)  # of each group: numbers of the world
        self.numbers = itertools.count()
        self.groups: weakref.WeakSet[Any] = weakref.WeakSet()
        """Groups that are alive."""
        self.closed: list[int] = []
        """Groups that were shut down or aborted."""
        self.ended: set[tuple[int, int]] = set()
        """The same, each with the rank in it, which sends nothing there any more."""
        self.errors: dict[int, BaseException] = {}

    @property
    def logs(self) -> list[list[Entry]]:
        """What every host has done."""
        return [rank.log for rank in self.ranks]

    def forget(self) -> None:
        """Drop what was written so far; to be called where no other rank is working."""
        for rank in self.ranks:
            rank.log.clear()

    def lose(self, rank: int) -> None:
        """Let a rank send nothing any more."""
        with self.changed:
            self.lost.add(rank)
            self.changed.notify_all()

    def run(self, function: Callable[..., Any], *args: Any, watch: bool = False) -> list[Any]:
        """Return ``function(rank, size, *args)`` of every rank; raise the first error.

        With ``watch`` all accesses to memory are written down.
        """
        results: list[Any] = [None] * self.size
        store = dist.HashStore()
        store.set_timeout(timedelta(seconds=60))

        def work(number: int) -> None:
            _HERE.rank = self.ranks[number]
            try:
                dist.init_process_group(BACKEND, rank=number, world_size=self.size, store=store)
                with Watching(self.ranks[number]) if watch else nullcontext():
                    if watch:
                        self.ranks[number].memories = Memories()
                    results[number] = function(number, self.size, *args)
            except BaseException as error:
                self.errors[number] = error
            finally:
                self.lose(number)

        with installed():
            threads = [threading.Thread(target=work, args=(n,), name=f"rank {n}") for n in range(self.size)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        gc.collect()
        errors = list(self.errors.values())
        if errors:
            raise errors[0]
        return results


class Rank:
    """A host and its device."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.log: list[Entry] = []
        self.streams = itertools.count(1)
        self.events = itertools.count()
        self.compute = Stream._of(self, 0)
        self.current = self.compute
        self.counts: dict[Any, Iterator[int]] = defaultdict(itertools.count)
        self.blocking = False
        self.memories: Memories | None = None
        self.quiet = False

    def write(self, kind: str, *args: Any) -> None:
        """Write down what the host does, and what it has freed before."""
        if self.memories is not None:
            self.log += [Entry("free", (memory,)) for memory in self.memories.freed()]
        self.log.append(Entry(kind, args))

    def accesses(self, *, reads: Tensor | None = None, writes: Tensor | None = None) -> list[Access]:
        """Return the accesses of a transfer, if they are watched."""
        if self.memories is None:
            return []
        both = ((reads, False), (writes, True))
        return [self.memories.access(tensor, writes=kind) for tensor, kind in both if tensor is not None]


def here() -> Rank:
    """Return the rank whose thread this is."""
    return _HERE.rank


class _Delivery:
    """A transfer whose tensors have not been asked for yet."""

    def __init__(self, group: StandInGroup, fill: Callable[[], bool]) -> None:
        self.group, self._fill, self.ended, self.hung = group, fill, False, False

    def settle(self) -> bool:
        """Deliver; return whether the tensors have come or will come, else the stream hangs."""
        if not self.ended:
            with quiet(here()):
                self.hung = not self._fill()
            self.ended = True
        return not self.hung or self.group.aborted


class Stream:
    """In place of ``torch.cuda.Stream``."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self._begin(here(), next(here().streams))

    @classmethod
    def _of(cls, rank: Rank, number: int) -> Stream:
        stream = cls.__new__(cls)
        stream._begin(rank, number)
        return stream

    def _begin(self, rank: Rank, number: int) -> None:
        self.rank, self.number = rank, number
        self.deliveries: list[_Delivery] = []

    @property
    def place(self) -> tuple[int, int]:
        return self.number, self.number

    @property
    def hung(self) -> bool:
        """Whether something before the next operation never ends."""
        return not all(delivery.settle() for delivery in self.deliveries)

    def wait_event(self, event: Event) -> None:
        if event.number is None:
            return
        here().write("wait", self.place, event.number)
        hanging = [delivery for delivery in event.deliveries if not delivery.settle()]
        self.deliveries += [delivery for delivery in hanging if delivery not in self.deliveries]

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)

    def __enter__(self) -> None:
        rank = here()
        self._before, rank.current = rank.current, self
        self.deliver()

    def __exit__(self, *error: object) -> None:
        here().current = self._before

    def deliver(self) -> None:
        """Let tensors come before the next kernel: what the host queues computes at once."""
        self.deliveries = [delivery for delivery in self.deliveries if not delivery.settle()]


class Event:
    """In place of ``torch.cuda.Event``."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.number: int | None = None
        self.deliveries: list[_Delivery] = []
        self.time = 0.0

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or here().current
        self.number, self.deliveries, self.time = next(here().events), list(stream.deliveries), time.perf_counter()
        here().write("record", stream.place, self.number)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or here().current).wait_event(self)

    def query(self) -> bool:
        rank = here()
        if rank.blocking:
            rank.blocking = False
            rank.write("block", self.number)
        elif self.deliveries:
            return False  # the host need not know, and so does not depend on the time
        return all(delivery.settle() for delivery in self.deliveries)

    def elapsed_time(self, other: Event) -> float:
        return (other.time - self.time) * 1e3


class _Work:
    """In place of a work of NCCL."""

    def __init__(self, event: Event) -> None:
        self.event = event

    def wait(self, timeout: timedelta | None = None) -> bool:
        here().current.wait_event(self.event)
        if timeout is not None:  # then NCCL blocks the thread
            here().write("block", self.event.number)
        return True

    def is_completed(self) -> bool:
        return False


class StandInGroup(dist.ProcessGroup):
    """In place of NCCL's process group.

    A transfer between two ranks has a stream and a communicator of its own where communicators are lazy, else the
    group's.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._number_of, self._size_of, self.timeout = rank, size, timeout
        owner = self.owner = here()
        world = self.world = owner.world
        self.number = int(store.compare_set("standin", "", str(next(world.numbers))))
        with world.changed:
            world.members[self.number][rank] = owner.number
            world.groups.add(self)
        self.aborted = False
        self._streams: dict[Any, Stream] = {}
        self._made: set[Any] = set()
        self.purpose = ""

    def size(self) -> int:
        return self._size_of

    def rank(self) -> int:
        return self._number_of

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    def _get_backend(self, device: torch.device) -> StandInGroup:
        return self

    def abort(self) -> None:
        with self.world.changed:
            self.aborted = True
            self.world.ended.add((self.number, self.rank()))
            self.world.closed.append(self.number)
            self.world.changed.notify_all()

    def shutdown(self) -> None:
        self.abort()

    # ---------------------------------------------------------------------------------------------- transfers

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> _Work:
        _check_dtype(tensors[0])
        with self._beside(*sorted((self.rank(), peer))) as channel:
            self._launch(channel, "p2p", (self.rank(), peer), 2, here().accesses(reads=tensors[0]))
            self._post("p2p", self.rank(), peer, tensors[0])
        return _Work(self._event)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> _Work:
        _check_dtype(tensors[0])
        with self._beside(*sorted((self.rank(), peer))) as channel:
            self._launch(channel, "p2p", (peer, self.rank()), 2, here().accesses(writes=tensors[0]))
            target = _Borrowed(tensors[0])
            self._expect(lambda: self._copy(target, "p2p", peer))
        return _Work(self._event)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> _Work | None:
        accesses = here().accesses(reads=tensors[0], writes=tensors[0])
        return self._collective(opts, accesses, lambda: self._start_sum(tensors[0]))

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> _Work | None:
        accesses = [access for tensor in tensors for access in here().accesses(reads=tensor, writes=tensor)]
        return self._collective(opts, accesses, lambda: [self._start_sum(tensor) for tensor in tensors])

    def all_to_all_single(
        self, output: Tensor, source: Tensor, receive: list[int], send: list[int], opts: Any = None
    ) -> _Work | None:
        accesses = here().accesses(reads=source, writes=output)
        return self._collective(opts, accesses, lambda: self._start_exchange(output, source, receive, send))

    alltoall_base = all_to_all_single

    def _collective(self, opts: Any, accesses: list[Access], start: Callable[[], object]) -> _Work | None:
        if opts is not None and not getattr(opts, "asyncOp", True):
            self._launch(here().current, "all", (), self.size(), accesses)
            start()
            return None
        with self._beside() as channel:
            self._launch(channel, "all", (), self.size(), accesses)
            start()
        return _Work(self._event)

    def _start_sum(self, tensor: Tensor) -> None:
        for peer in range(self.size()):
            self._post("all", self.rank(), peer, tensor)

        target = _Borrowed(tensor)

        def fill() -> bool:
            parts = [self._take("all", peer) for peer in range(self.size())]
            if any(part is _NEVER for part in parts):
                return False
            target.fill(sum(parts[1:], parts[0]))
            return True

        self._expect(fill)

    def _start_exchange(self, output: Tensor, source: Tensor, receive: list[int], send: list[int]) -> None:
        even = [len(source) // self.size()] * self.size()
        with quiet(here()):
            parts = source.detach().split(list(send) or even)
            sizes = list(receive) or [len(output) // self.size()] * self.size()
            targets = [_Borrowed(part) for part in output.detach().split(sizes)]
        for peer, part in enumerate(parts):
            self._post("all", self.rank(), peer, part)

        def fill() -> bool:
            parts = [self._take("all", peer) for peer in range(self.size())]
            if any(part is _NEVER for part in parts):
                return False
            for target, part in zip(targets, parts, strict=True):
                target.fill(part)
            return True

        self._expect(fill)

    # ---------------------------------------------------------------------------------------------- streams

    @contextmanager
    def _beside(self, *pair: int) -> Iterator[Stream]:
        """Run a transfer on a stream of the group, after all that the current stream has been given."""
        stream = self._streams.get(pair)
        if stream is None:
            stream = self._streams[pair] = Stream()
            whole = self._streams.setdefault((), stream)
            stream.pair = (stream.number, whole.number)  # type: ignore[attr-defined]
        before, self._event = Event(), Event()
        rank = here()
        before.record(rank.current)
        both = _Placed(stream, stream.pair)  # type: ignore[attr-defined]
        rank.write("wait", both.place, before.number)
        stream.deliveries += [delivery for delivery in before.deliveries if delivery not in stream.deliveries]
        outside, rank.current = rank.current, both  # type: ignore[assignment]
        try:
            yield stream
        finally:
            rank.current = outside
        self._event.number, self._event.deliveries = next(rank.events), list(stream.deliveries)
        rank.write("record", both.place, self._event.number)

    def _launch(self, stream: Stream, kind: str, ends: tuple[int, ...], ranks: int, accesses: list[Access]) -> None:
        rank = here()
        pair = tuple(sorted(ends)) if kind == "p2p" else ()
        lazy, eager = (self.number, kind, *pair), (self.number,)
        if lazy not in self._made:
            self._made.add(lazy)
            rank.write("create", lazy, ranks)
        meeting = (self.number, kind, ends, next(rank.counts[self.number, kind, ends]))
        rank.write("comm", rank.current.place, (lazy, eager), meeting, ranks, f"transfer {meeting}", accesses)
        self._stream = stream

    def _post(self, kind: str, source: int, to: int, tensor: Tensor) -> None:
        stream, world = self._stream, self.world
        with quiet(here()), torch.no_grad():
            value = _NEVER if any(d.ended and not d.settle() for d in stream.deliveries) else tensor.detach().clone()
        with world.changed:
            world.mail[self.number, kind, source, to].append(value)
            world.changed.notify_all()

    def _expect(self, fill: Callable[[], bool]) -> None:
        self._stream.deliveries.append(_Delivery(self, fill))

    def _copy(self, target: _Borrowed, kind: str, source: int) -> bool:
        value = self._take(kind, source)
        if value is _NEVER:
            return False
        target.fill(value)
        return True

    def _take(self, kind: str, source: int) -> Any:
        world, key = self.world, (self.number, kind, source, self.rank())
        deadline = time.monotonic() + STUCK_S
        with world.changed:
            while not world.mail[key]:
                ended = self.aborted or (self.number, source) in world.ended
                if ended or world.members[self.number].get(source) in world.lost:
                    return _NEVER
                if self.owner.number in world.lost:
                    raise Stopped
                if not world.changed.wait(max(0.0, deadline - time.monotonic())):
                    raise AssertionError(f"rank {self.owner.number} waits for {key}, whose rank is alive")
            return world.mail[key].popleft()


def _check_dtype(tensor: Tensor) -> None:
    if tensor.dtype is torch.int16 or tensor.is_complex():
        raise TypeError(f"NCCL has no {tensor.dtype}")


class _Borrowed:
    """A tensor to be filled, unless its memory was freed: as on a device, a transfer does not keep it."""

    def __init__(self, tensor: Tensor) -> None:
        self._memory = StorageWeakRef(tensor.untyped_storage())
        self._dtype, self._place = tensor.dtype, (tensor.storage_offset(), tensor.size(), tensor.stride())

    def fill(self, value: Tensor) -> None:
        memory = torch.UntypedStorage._new_with_weak_ptr(self._memory.cdata)
        if memory is not None:
            with torch.no_grad():
                torch.empty(0, dtype=self._dtype).set_(memory, *self._place).copy_(value)


class _Placed:
    """A stream of a group while a transfer is launched on it, with both of its names."""

    def __init__(self, stream: Stream, place: tuple[int, int]) -> None:
        self.stream, self.place = stream, place


dist.Backend.register_backend(BACKEND, StandInGroup, devices=["cpu"])


class Cuda:
    """In place of the module ``torch.cuda``."""

    Stream, Event = Stream, Event
    default_generators = (torch.default_generator,)

    @staticmethod
    def get_device_properties(device: Any) -> Any:
        return SimpleNamespace(multi_processor_count=132)

    @staticmethod
    def current_stream(device: Any = None) -> Stream:
        return here().current

    @staticmethod
    def stream(stream: Stream) -> Stream:
        return stream

    @staticmethod
    def synchronize(device: Any = None) -> None:
        here().write("sync")

    @staticmethod
    def memory_allocated(device: Any) -> int:
        return 0

    max_memory_allocated = memory_reserved = memory_allocated
    reset_peak_memory_stats = memory_allocated

    @staticmethod
    def mem_get_info(device: Any) -> tuple[int, int]:
        return 2**40, 2**40

    @staticmethod
    def _sleep(cycles: int) -> None:
        here().write("kernel", here().current.place, "sleep", [])


def _record_stream(tensor: Tensor, stream: Stream) -> None:
    rank = here()
    if rank.memories is not None:
        rank.write("frees", stream.place, rank.memories.access(tensor, writes=False).memory)


def _behind(note: Callable[..., object], call: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any) -> Any:
        note(*args)
        return call(*args)

    return noted


def _note_turn(_: Player, turn: Any) -> None:
    here().write("node", str(turn))


def _note_meeting(mesh: Any, dimension: str, *_: Any) -> None:
    if mesh._control.get(dimension) is not None:
        key = (mesh.own.name, tuple(mesh.along(dimension)))
        here().write("meet", (key, next(here().counts[key])), mesh.size(dimension))


def _note_meeting_of_experts(mesh: Any) -> None:
    for dimension in mesh.experts_over:
        _note_meeting(mesh, dimension)


def _noting_reads(read: Callable[..., Any]) -> Callable[..., Any]:
    def noted(self: HostCopy, *limits: Any) -> Sequence[Tensor]:
        tensors: Sequence[Tensor] = read(self, *limits)
        rank = here()
        rank.write("host", "the host reads", [access for t in tensors for access in rank.accesses(reads=t)])
        return tensors

    return noted


def _delivering(on: Any) -> Any:
    def noted(cls: type[HostCopy], stream: Any, *tensors: Tensor, behind: Any = None, **options: Any) -> HostCopy:
        def fill(*sources: Tensor) -> None:
            behind(*sources)
            here().current.deliver()  # what follows in the job reads what has come

        return on(stream, *tensors, behind=behind and fill, **options)  # type: ignore[no-any-return]

    return classmethod(noted)


def _block(*_: Any) -> None:
    here().blocking = True


def _going_on(device: Any) -> Callable[[], bool]:
    """Without the events of :func:`streams.going_on`: a watchdog is another thread than the rank's."""
    compute = here().compute
    return lambda: not any(one.ended and one.hung and not one.group.aborted for one in list(compute.deliveries))


@contextmanager
def installed() -> Iterator[None]:
    """Put the stand-in in the place of CUDA, for tensors of the CPU."""
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    with ExitStack() as stack:
        threaded._install_threaded_pg()
        stack.callback(threaded._uninstall_threaded_pg)
        torch._C._distributed_c10d._set_thread_isolation_mode(True)
        stack.callback(torch._C._distributed_c10d._set_thread_isolation_mode, False)
        for owner, name, value in (
            (devices, "gpu_of", lambda device: Cuda if hasattr(_HERE, "rank") else None),
            (Tensor, "record_stream", _record_stream),
            (streams, "going_on", _going_on),
            (devices, "in_host_memory", lambda like: host_memory(here(), like)),
            (HostCopy, "on", _delivering(HostCopy.on)),
            (HostCopy, "read", _noting_reads(HostCopy.read)),
            (EventMark, "synchronize", _behind(_block, EventMark.synchronize)),
            (Player, "_play_observed", _behind(_note_turn, Player._play_observed)),
            (Mesh, "gathered", _behind(_note_meeting, Mesh.gathered)),
            (Mesh, "barrier", _behind(_note_meeting_of_experts, Mesh.barrier)),
        ):
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(functions_cross())  # else the first thread that ends its step would end it for all
        yield
