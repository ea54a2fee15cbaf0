"""Side streams and marks on them: a device's streams and events, or a thread in their place.

On a GPU the thread only queues kernels, and events order a side stream's transfers with these kernels. On a CPU the
thread itself computes, and a :class:`ThreadStream` replaces the side stream.
"""

import math
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from overlap1f1b.transport import devices
from overlap1f1b.transport.failures import Failures

Job = Callable[..., object]

SPIN_S, PAUSE_S = 1e-3, 5e-5
"""How long a host that waits for an event looks all the time, and its pause between two looks after that."""


def going_on(device: torch.device) -> Callable[[], bool]:
    """Return a function that tells whether a GPU has done what it had been given at the call before.

    It looks at the stream that is current now, and may be called in any thread. A thread of its own waits for the
    device: a host inside a copy to pageable memory holds a lock of the driver, for which every question may wait.
    """
    gpu, waiting = devices.gpu_of(device), threading.Thread()
    stream = gpu.current_stream(device)

    def wait() -> None:
        with suppress(RuntimeError):  # of a device that has failed: the host's own calls raise, too
            gpu.set_device(stream.device)  # else the driver takes memory on the first GPU
            event = gpu.Event(blocking=True)
            event.record(stream)
            event.synchronize()

    def goes_on() -> bool:
        nonlocal waiting
        if waiting.is_alive():
            return False
        waiting = threading.Thread(target=wait, name="overlap1f1b-waits", daemon=True)
        with suppress(RuntimeError):  # there are too many threads now
            waiting.start()
        return True

    return goes_on


class Mark(Protocol):
    """End of a job on a stream; both times are seconds of ``time.perf_counter``, or events of the device."""

    @property
    def begun(self) -> Any: ...

    @property
    def ended(self) -> Any: ...

    def wait(self, timeout: timedelta | None = None) -> None:
        """Order all later computation after the mark. On a GPU the thread does not block."""

    def synchronize(self, failures: Failures | None = None) -> None:
        """Block the thread until the mark is reached, for a transfer between ranks that share ``failures``.

        TimeoutError if it was not within their limit; ConnectionError if a watchdog has found that another rank failed.
        """

    def is_completed(self) -> bool:
        """Return whether the mark is reached."""


class SideStream(Protocol):
    """A stream beside the computation; its jobs run in the order of their calls."""

    def run(self, job: Job, *tensors: Tensor, after: Sequence[Mark] | None = None) -> Mark:
        """Queue ``job(*tensors)`` behind the marks ``after``, by default behind all computed so far; return its end.

        The caller keeps the tensors until its computation has waited for that. So they need no ``record_stream``.
        """

    def empty(self, like: Tensor, *shape: int) -> Tensor:
        """Return memory of the stream's own, as ``like``: a job may fill it before compute has come to this place.

        Other memory of a GPU may have been freed by kernels that compute still has to run.
        """
        return like.new_empty(shape)


class EventMark:
    """Mark of a job between two events of a device."""

    def __init__(self, device: torch.device, begun: Any, ended: Any) -> None:
        self.device, self.begun, self.ended = device, begun, ended

    def wait(self, timeout: timedelta | None = None) -> None:
        devices.gpu_of(self.device).current_stream(self.device).wait_event(self.ended.event)

    def synchronize(self, failures: Failures | None = None) -> None:
        """Wait on the host until the mark has passed, or another rank has failed, within the limit."""
        # The event's own synchronize has no limit. Most waits are for a few bytes and last microseconds; longer ones
        # leave the processor and Python's lock to other threads, such as those of a data loader.
        begun = time.monotonic()
        deadline = math.inf if failures is None else begun + failures.limit.total_seconds()
        while True:
            done = self.ended.event.query()
            if failures is not None and failures.lost:  # asked last: a transfer that was aborted has ended, too
                raise ConnectionError("another rank failed")
            if done:
                return
            if (now := time.monotonic()) > deadline:
                raise TimeoutError("no answer")
            time.sleep(0.0 if now < begun + SPIN_S else PAUSE_S)

    def is_completed(self) -> bool:
        return bool(self.ended.event.query())


class DeviceStream:
    """A stream of a device; of priority −1 the blocks of its kernels go first, 0 is the default."""

    def __init__(self, device: torch.device, *, priority: int = -1) -> None:
        if os.environ.get(devices.CONNECTIONS) == "1":
            warnings.warn(f"{devices.CONNECTIONS}=1 makes streams wait for each other; unset it", stacklevel=2)
        self.device, self.gpu = device, devices.gpu_of(device)
        self.stream = self.gpu.Stream(device, priority=priority)
        self._stamp = devices.Stamps(device)

    def run(self, job: Job, *tensors: Tensor, after: Sequence[Mark] | None = None) -> EventMark:
        """Queue a job behind what is queued so far, or behind marks; return the mark of its end."""
        if after is None:
            self.stream.wait_stream(self.gpu.current_stream(self.device))
        else:
            for mark in after:
                self.stream.wait_event(mark.ended.event)
        with self.gpu.stream(self.stream):
            begun = self._stamp(self.stream)
            job(*tensors)
            return EventMark(self.device, begun, self._stamp(self.stream))

    def empty(self, like: Tensor, *shape: int) -> Tensor:
        with self.gpu.stream(self.stream):
            tensor = like.new_empty(shape)
        tensor.record_stream(self.gpu.current_stream(self.device))  # which uses and frees it
        return tensor


class ThreadMark:
    """Mark of a job of a :class:`ThreadStream`."""

    def __init__(self) -> None:
        self.begun = self.ended = 0.0
        self.error: BaseException | None = None
        self._reached = threading.Event()

    def begin(self) -> None:
        """Note that the job begins."""
        self.begun = time.perf_counter()

    def reach(self, error: BaseException | None = None) -> None:
        """Note that the job has ended, with an error if there is one."""
        self.ended, self.error = time.perf_counter(), error
        self._reached.set()

    def synchronize(self, failures: Failures | None = None) -> None:
        self.wait(None if failures is None else failures.limit)

    def wait(self, timeout: timedelta | None = None) -> None:
        if not self._reached.wait(None if timeout is None else timeout.total_seconds()):
            raise TimeoutError("no answer")
        if self.error is not None:
            raise self.error

    def is_completed(self) -> bool:
        return self._reached.is_set()


class InlineStream(SideStream):
    """The calling thread in place of a side stream: a job has ended when :meth:`run` returns."""

    def run(self, job: Job, *tensors: Tensor, after: Sequence[Mark] | None = None) -> ThreadMark:
        mark = ThreadMark()
        mark.begin()
        job(*tensors)
        mark.reach()
        return mark


_Entry = tuple[ThreadMark, Job, tuple[Tensor, ...], Sequence[Mark]]


class ThreadStream(SideStream):
    """A thread in place of a device's stream."""

    def __init__(self, name: str = "stream") -> None:
        self._jobs: SimpleQueue[_Entry | None] = SimpleQueue()
        self.close = weakref.finalize(self, self._jobs.put, None)
        """End the thread."""
        threading.Thread(target=_work, args=(self._jobs,), name=f"overlap1f1b-{name}", daemon=True).start()

    def run(self, job: Job, *tensors: Tensor, after: Sequence[Mark] | None = None) -> ThreadMark:
        # On a CPU the thread has finished its computation so far: without marks there is nothing to wait for.
        mark = ThreadMark()
        self._jobs.put((mark, job, tensors, after or ()))
        return mark


def _work(jobs: SimpleQueue[_Entry | None]) -> None:
    """Carry out jobs one after another, until there is None."""
    while (entry := jobs.get()) is not None:
        mark, job, tensors, after = entry
        try:
            for earlier in after:
                earlier.synchronize()
            mark.begin()
            with torch.no_grad():
                job(*tensors)
            del tensors
            mark.reach()
        except BaseException as error:  # raised in the thread that waits
            mark.reach(error)
        del entry, mark, job, after


def copy_by_kernel(target: Tensor, source: Tensor) -> None:
    """Copy int64 numbers by a kernel: a copy engine would first end the large copies that it was given before."""
    torch.add(source, 0, out=target)


class HostCopy(NamedTuple):
    """Small tensors on their way to the host, to be read later."""

    tensors: Sequence[Tensor]  # tensors in host memory
    mark: Mark  # end of the copy

    @classmethod
    def on(cls, stream: SideStream, *tensors: Tensor, by_kernel: bool = False, behind: Job | None = None) -> Self:
        """Copy ``tensors`` after the stream's earlier jobs; the caller keeps them until :meth:`read`.

        A job ``behind(*tensors)`` may fill them first. ``by_kernel`` kernels copy int64 tensors, see
        :func:`copy_by_kernel`: torch does not know that, so the caller keeps the copy, too, until it has ended.
        """
        host = targets = [devices.in_host_memory(t) for t in tensors]
        if by_kernel and not tensors[0].is_cpu:
            targets = [devices.mapped(target, tensors[0].device) for target in host]

        def copy(*sources: Tensor) -> None:
            if behind is not None:
                behind(*sources)
            for target, source in zip(targets, sources, strict=True):
                if by_kernel:
                    copy_by_kernel(target, source)
                else:
                    target.copy_(source, non_blocking=True)

        return cls(host, stream.run(copy, *tensors))

    def read(self, failures: Failures | None = None) -> Sequence[Tensor]:
        """Wait for the copy as :meth:`Mark.synchronize` does, and return the tensors."""
        self.mark.synchronize(failures)
        return self.tensors


def side_stream(device: torch.device, name: str) -> SideStream:
    """Return a new side stream of a device, of high priority; a thread for a CPU."""
    return ThreadStream(name) if devices.gpu_of(device) is None else DeviceStream(device)
