"""Queues of work beside the one that computes, and points on them: CUDA's streams and events, or threads.

A thread that computes on a CUDA device only queues kernels; a transfer on a second stream is ordered with them by
events. On a CPU the thread itself computes, and a :class:`ThreadStream` stands in: everything but speed is the same, so
that order, waits and lifetimes are tested without a GPU.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Job = Callable[..., object]


class Mark(Protocol):
    """Where a job of a stream ends.

    ``begun`` and ``ended`` are stamps of its start and its end: seconds of ``time.perf_counter``, or CUDA events.
    """

    @property
    def begun(self) -> Any: ...

    @property
    def ended(self) -> Any: ...

    def wait(self, timeout: timedelta | None = None) -> None:
        """What is computed from now on comes after it. On CUDA the thread does not stop."""
        ...

    def synchronize(self, timeout: timedelta | None = None) -> None:
        """The thread waits for it.

        Raises:
            TimeoutError: It was not reached within the limit.
        """
        ...

    def is_completed(self) -> bool:
        """Whether it has been reached."""
        ...


class SideStream(Protocol):
    """Jobs in the order of their calls, beside what the thread computes."""

    def run(self, job: Job, *tensors: Tensor, after: Sequence[Mark] | None = None) -> Mark:
        """Has ``job(*tensors)`` done, after the marks; without any, after what the thread has computed so far.

        The caller keeps the tensors until its computation waits for the mark, and so need not record them: whatever
        frees them is then behind the mark. A stand-in sees to it that they are kept.
        """
        ...


class CudaMark:
    """Two events around a job."""

    def __init__(self, device: torch.device, begun: Any, ended: Any) -> None:
        self.device, self.begun, self.ended = device, begun, ended

    def wait(self, timeout: timedelta | None = None) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.ended)

    def synchronize(self, timeout: timedelta | None = None) -> None:
        # Not the event's own synchronize, which would wait for ever. What is waited for so is a few bytes that arrive
        # while other kernels run: microseconds.
        deadline = None if timeout is None else time.monotonic() + timeout.total_seconds()
        while not self.ended.query():
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError("no answer")
            time.sleep(0)

    def is_completed(self) -> bool:
        done: bool = self.ended.query()
        return done


class CudaStream:
    """A CUDA stream.

    Args:
        device: Of the tensors.
        priority: −1 for high: the blocks of its kernels go first; 0 for that of any other.
    """

    def __init__(self, device: torch.device, *, priority: int = -1) -> None:
        if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
            warnings.warn("CUDA_DEVICE_MAX_CONNECTIONS=1 makes streams wait for each other; unset it", stacklevel=2)
        self.device, self.stream = device, torch.cuda.Stream(device, priority=priority)

    def run(self, job: Job, *tensors: Tensor, after: Sequence[Mark] | None = None) -> CudaMark:
        if after is None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        else:
            for mark in after:
                self.stream.wait_event(mark.ended)
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self.stream):
            begun.record(self.stream)
            job(*tensors)
            ended.record(self.stream)
        return CudaMark(self.device, begun, ended)


class ThreadMark:
    """Where a thread's job ends."""

    def __init__(self) -> None:
        self.begun = self.ended = 0.0
        self.error: BaseException | None = None
        self._reached = threading.Event()

    def reach(self, error: BaseException | None = None) -> None:
        """The job has ended."""
        self.ended, self.error = time.perf_counter(), error
        self._reached.set()

    def wait(self, timeout: timedelta | None = None) -> None:
        self.synchronize(timeout)

    def synchronize(self, timeout: timedelta | None = None) -> None:
        if not self._reached.wait(None if timeout is None else timeout.total_seconds()):
            raise TimeoutError("no answer")
        if self.error is not None:
            raise self.error

    def is_completed(self) -> bool:
        return self._reached.is_set()


class _Borrowed:
    """A tensor without a hold on its memory."""

    def __init__(self, tensor: Tensor) -> None:
        self._memory = StorageWeakRef(tensor.untyped_storage())
        self._dtype, self._place = tensor.dtype, (tensor.storage_offset(), tensor.size(), tensor.stride())

    def tensor(self) -> Tensor:
        """The tensor; its memory must not have been let go of."""
        memory = torch.UntypedStorage._new_with_weak_ptr(self._memory.cdata)
        if memory is None:
            raise AssertionError("a tensor was let go of before the stream had done with it")
        return torch.empty(0, dtype=self._dtype).set_(memory, *self._place)


_Entry = tuple[ThreadMark, Job, list[_Borrowed], tuple[Mark, ...]]


class ThreadStream:
    """A thread in place of a CUDA stream.

    Like a stream it does not keep what it works on: a job whose tensors are gone when it is its turn raises in whoever
    waits for it, where a GPU would read memory that holds something else by then.

    Args:
        name: Of the thread.
        delay: Seconds to let pass before each job, for tests.
    """

    def __init__(self, name: str = "stream", delay: Callable[[], float] | None = None) -> None:
        self._jobs: SimpleQueue[_Entry | None] = SimpleQueue()
        thread = threading.Thread(target=_work, args=(self._jobs, delay), name=f"overlap1f1b-{name}", daemon=True)
        self.close = weakref.finalize(self, self._jobs.put, None)
        """Ends the thread."""
        thread.start()

    def run(self, job: Job, *tensors: Tensor, after: Sequence[Mark] | None = None) -> ThreadMark:
        # The thread has computed everything that it has asked for so far: without marks there is nothing to wait for.
        mark = ThreadMark()
        self._jobs.put((mark, job, [_Borrowed(tensor) for tensor in tensors], tuple(after or ())))
        return mark


def _work(jobs: SimpleQueue[_Entry | None], delay: Callable[[], float] | None) -> None:
    while (entry := jobs.get()) is not None:
        mark, job, held, after = entry
        try:
            for earlier in after:
                earlier.synchronize()
            if delay is not None:
                time.sleep(delay())
            tensors = [borrowed.tensor() for borrowed in held]
            mark.begun = time.perf_counter()
            with torch.no_grad():
                job(*tensors)
            del tensors
            mark.reach()
        except BaseException as error:  # it belongs to the thread that waits
            mark.reach(error)
        del entry, mark, job, held, after


class HostCopy:
    """Small tensors on their way to the host, where they are read late.

    Args:
        tensors: In host memory, or still elsewhere where nothing copies on the side.
        mark: From which on they are there.
    """

    def __init__(self, tensors: Sequence[Tensor], mark: Mark | None = None) -> None:
        self.tensors, self.mark = tensors, mark

    @classmethod
    def on(cls, stream: SideStream, *tensors: Tensor) -> HostCopy:
        """Copied behind what the stream has been given; the caller keeps ``tensors`` until they have been read."""
        pinned = tensors[0].is_cuda
        host = [torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=pinned) for t in tensors]

        def copy(*sources: Tensor) -> None:
            for target, source in zip(host, sources, strict=True):
                target.copy_(source, non_blocking=True)

        return cls(host, stream.run(copy, *tensors))

    def read(self, timeout: timedelta | None = None) -> Sequence[Tensor]:
        """Waits for them."""
        if self.mark is not None:
            self.mark.synchronize(timeout)
        return self.tensors


def side_stream(device: torch.device, name: str, *, priority: int = -1) -> SideStream:
    """A stream of the device: CUDA's, or a thread."""
    return CudaStream(device, priority=priority) if device.type == "cuda" else ThreadStream(name)
