"""The expert all-to-all: who sends how many rows to whom, and the transfers themselves, outside autograd."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from overlap1f1b.transport.groups import Groups, abort, backend_of
from overlap1f1b.transport.streams import HostCopy, Mark, SideStream, side_stream

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class Transfer(Generic[T_co]):
    """Something that is under way between ranks.

    Args:
        result: What is received; valid after :meth:`receive`.
        receives: Works that fill ``result``.
        sends: Works that read ``source``, which lives as long as the transfer.
        source: What is sent.
        ahead: A transfer in front of this one on the same links, so that this one's time alone can be told.
        mark: Its end on a stream, where it has no works.
        host: Of counts: those that were sent and those that are received, on their way to the host.
    """

    result: T_co
    receives: Sequence[dist.Work] = ()
    sends: Sequence[dist.Work] = ()
    source: Tensor | Sequence[Tensor] | None = None
    ahead: Transfer[T_co] | None = None
    mark: Mark | None = None
    host: HostCopy | None = None

    def receive(self, timeout: timedelta | None = None) -> T_co:
        """Waits for the result (on CUDA the current stream does) and returns it. Once only: gloo hangs on a second."""
        _wait(self.receives, timeout)
        if self.mark is not None:
            self.mark.wait(timeout)
        return self.result

    def release(self, timeout: timedelta | None = None) -> None:
        """Waits until what was sent may be overwritten."""
        if self.ahead is not None:
            self.ahead.release(timeout)
        _wait(self.sends, timeout)

    @property
    def done(self) -> bool:
        """Whether everything has been received and sent."""
        ended = self.mark is None or self.mark.is_completed()
        return ended and all(work.is_completed() for work in (*self.receives, *self.sends))

    def finish(self, timeout: timedelta | None = None) -> T_co:
        """Waits for both."""
        self.receive(timeout)
        self.release(timeout)
        return self.result


def _wait(works: Sequence[dist.Work], timeout: timedelta | None) -> None:
    for work in works:
        work.wait(timeout) if timeout is not None else work.wait()


class EqualSplits(list[int]):
    """Rows to or from each rank, which are the same number between any two ranks: a collective of its own on NCCL."""


class Expected(NamedTuple):
    """A receive that was announced before its exchange is launched.

    A peer that is ahead can send at once, and how far the ranks drift apart costs no time on the wire.
    """

    result: Tensor
    receives: Sequence[dist.Work]


class Exchange(Protocol):
    """Uneven all-to-all over the ranks of a group; its backward is itself with the sizes swapped.

    ``tag`` tells exchanges apart that are in flight together; those of one tag meet in order.
    """

    ranks: int
    rank: int
    background: bool = False
    """Whether a transfer is best started and awaited by a thread of its own."""
    sms: int = 0
    """Multiprocessors of a GPU that a transfer occupies while it is in flight."""

    def rows(
        self,
        source: Tensor,
        send: Sequence[int],
        receive: Sequence[int],
        tag: int = 0,
        expected: Expected | None = None,
        /,
    ) -> Transfer[Tensor]:
        """Launches the exchange of ``source [sum(send), H]``, whose parts go to the ranks in order.

        The transfer's result is ``[sum(receive), H]``, the parts of the ranks in order.
        """
        ...

    def counts(self, counts: Tensor, tag: int = 0, expected: Expected | None = None, /) -> Transfer[Tensor]:
        """Launches the exchange of ``counts [E]``; the result ``[ranks, E / ranks]`` has a row for each source rank."""
        ...

    def abort(self, *, ending: bool = False) -> None:
        """Ends every transfer that is under way; nothing can be sent any more.

        Groups of the user's are left alone, unless the process is ``ending``.
        """
        return None

    def expect_rows(self, like: Tensor, receive: Sequence[int], tag: int, /) -> Expected | None:
        """Announces the receive of the ``rows`` of this tag, of the width and dtype of ``like``; None where no use."""
        return None

    def expect_counts(self, like: Tensor, tag: int, /) -> Expected | None:
        """Announces the receive of the ``counts`` of this tag, which are as many as ``like``; None where no use."""
        return None


class LocalExchange(Exchange):
    """One rank: everything stays where it is."""

    ranks = 1
    rank = 0

    def rows(self, source: Tensor, *_: Any) -> Transfer[Tensor]:
        return Transfer(source)

    def counts(self, counts: Tensor, *_: Any) -> Transfer[Tensor]:
        return Transfer(counts.view(1, -1))


class PeerExchange(Exchange):
    """A posted receive and a send for every peer: full duplex on gloo, whose ``all_to_all_single`` is nearly half.

    gloo sends a payload once the receiver has announced its receive, and the announcement queues behind whatever the
    receiver sends on the same connection. So each direction has a connection of its own, and counts a third, or the
    lighter direction of an exchange would wait for the heavier one, and counts for everything.

    Args:
        groups: Three groups of the same ranks: rows to higher ranks, rows to lower ranks, counts. Equal ones work too.
    """

    background = True

    def __init__(self, groups: tuple[dist.ProcessGroup, dist.ProcessGroup, dist.ProcessGroup]) -> None:
        self.up, self.down, control = groups
        self.control = (control, control)
        self.ranks, self.rank = self.up.size(), self.up.rank()
        # Each rank starts with its next neighbour, so that not all of them send to the same one first.
        self.peers = [(self.rank + step) % self.ranks for step in range(1, self.ranks)]

    def abort(self, *, ending: bool = False) -> None:
        for group in (self.up, self.down, *self.control[:1]):
            if ending or isinstance(group, dist.ProcessGroupGloo):  # a registered one is the user's
                abort(group)

    def rows(
        self,
        source: Tensor,
        send: Sequence[int],
        receive: Sequence[int],
        tag: int = 0,
        expected: Expected | None = None,
    ) -> Transfer[Tensor]:
        expected = expected or self.expect_rows(source, receive, tag)
        return self._send(source.contiguous(), send, expected, receive, tag, (self.up, self.down))

    def counts(self, counts: Tensor, tag: int = 0, expected: Expected | None = None) -> Transfer[Tensor]:
        expected, ones = expected or self.expect_counts(counts, tag), [1] * self.ranks
        return self._send(counts.view(self.ranks, -1), ones, expected, ones, tag, self.control)

    def expect_rows(self, like: Tensor, receive: Sequence[int], tag: int) -> Expected:
        result = like.new_empty((sum(receive), *like.shape[1:]))
        return self._receive(result, receive, tag, (self.up, self.down))

    def expect_counts(self, like: Tensor, tag: int) -> Expected:
        result = torch.empty_like(like.view(self.ranks, -1))
        return self._receive(result, [1] * self.ranks, tag, self.control)

    def _receive(
        self, result: Tensor, receive: Sequence[int], tag: int, groups: tuple[dist.ProcessGroup, dist.ProcessGroup]
    ) -> Expected:
        (up, down), parts = groups, result.split(list(receive))
        works = [(up if p < self.rank else down).recv([parts[p]], p, tag) for p in reversed(self.peers) if receive[p]]
        return Expected(result, works)

    def _send(
        self,
        source: Tensor,
        send: Sequence[int],
        expected: Expected,
        receive: Sequence[int],
        tag: int,
        groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
    ) -> Transfer[Tensor]:
        (up, down), parts = groups, source.split(list(send))
        works = [(up if self.rank < p else down).send([parts[p]], p, tag) for p in self.peers if send[p]]
        expected.result.split(list(receive))[self.rank].copy_(parts[self.rank])
        return Transfer(expected.result, expected.receives, works, source)


class CollectiveExchange(Exchange):
    """torch's ``all_to_all_single``, on NCCL on streams of high priority: one for rows, one for counts.

    Collectives that are not asynchronous to torch run on the stream that is current, so they run on these, between
    events that tell how long they took. The counts are copied to the host on their stream.

    Args:
        rows_group: Ranks between which rows are exchanged.
        counts_group: The same ranks, with a queue of its own.
        streams: For rows and counts; by default those of the device, and without any on a CPU.
        sms: Blocks that the groups may use, see :func:`lane_groups`.
    """

    def __init__(
        self,
        rows_group: dist.ProcessGroup,
        counts_group: dist.ProcessGroup,
        streams: tuple[SideStream, SideStream] | None = None,
        sms: int = 0,
    ) -> None:
        self.rows_group, self.counts_group, self._streams, self.sms = rows_group, counts_group, streams, sms
        self.ranks, self.rank = rows_group.size(), rows_group.rank()

    def rows(self, source: Tensor, send: Sequence[int], receive: Sequence[int], *_: Any) -> Transfer[Tensor]:
        source = source.contiguous()
        result = source.new_empty((sum(receive), *source.shape[1:]))
        equal = isinstance(send, EqualSplits) and isinstance(receive, EqualSplits)
        splits = None if equal else (list(receive), list(send))
        streams = self._streams_of(source)
        if streams is None:
            work = _all_to_all(self.rows_group, splits, True, result, source)
            return Transfer(result, [_launched(work)], source=source)
        mark = streams[0].run(partial(_all_to_all, self.rows_group, splits, False), result, source)
        # Both outlive the exchange by construction: whoever holds the transfer, which holds them, waits for it first.
        return Transfer(result, source=source, mark=mark)

    def counts(self, counts: Tensor, *_: Any) -> Transfer[Tensor]:
        source = counts.view(self.ranks, -1)
        result = torch.empty_like(source)
        streams = self._streams_of(source)
        if streams is None:
            work = _all_to_all(self.counts_group, None, True, result, source)
            return Transfer(result, [_launched(work)], source=source)
        mark = streams[1].run(partial(_all_to_all, self.counts_group, None, False), result, source)
        # The route keeps both until it has read the copies.
        return Transfer(result, source=source, mark=mark, host=HostCopy.on(streams[1], source, result))

    def _streams_of(self, tensor: Tensor) -> tuple[SideStream, SideStream] | None:
        if self._streams is None and tensor.is_cuda:
            self._streams = side_stream(tensor.device, "rows"), side_stream(tensor.device, "counts")
        return self._streams


def _all_to_all(
    group: dist.ProcessGroup,
    splits: tuple[list[int], list[int]] | None,
    async_op: bool,
    result: Tensor,
    source: Tensor,
) -> dist.Work | None:
    receive, send = splits or (None, None)
    return dist.all_to_all_single(result, source, receive, send, group=group, async_op=async_op)


def _launched(work: dist.Work | None) -> dist.Work:
    assert work is not None, "a rank only exchanges with members of its group"
    return work


DEFAULT_CTAS = 16


def lane_groups(
    group: dist.ProcessGroup,
    count: int,
    ctas: int = DEFAULT_CTAS,
    *,
    timeout: timedelta | None = None,
    device: str = "cpu",
) -> list[dist.ProcessGroup]:
    """New groups of the same ranks, all of which must call this: their transfers share no queue with others.

    Args:
        group: Whose ranks.
        count: How many groups.
        ctas: Blocks that a transfer on NCCL may have at most, each on a multiprocessor that compute leaves to it.
        timeout: Limit of every wait; None for that of the default group.
        device: Type of the device whose tensors travel.
    """
    ranks = dist.get_process_group_ranks(group)
    groups = Groups(ranks, timeout, device=device)
    return [groups.new(ranks, f"lane {number}", ctas=ctas) for number in range(count)]


def build_exchange(
    group: dist.ProcessGroup | None, *lanes: dist.ProcessGroup, ctas: int = DEFAULT_CTAS, device: str | None = None
) -> Exchange:
    """The exchange that suits a group: local without one, peer to peer on gloo, a collective on NCCL.

    Args:
        group: Ranks that share the experts; None for one rank.
        lanes: Three groups of the same ranks, from :func:`lane_groups` with the same ``ctas``; without them all
            transfers share ``group``.
        ctas: See :func:`lane_groups`.
        device: Type of the device whose tensors travel; by default a GPU, where the group has a backend for one.
    """
    if group is None or group.size() == 1:
        return LocalExchange()
    up, down, control = lanes or (group, group, group)
    if device is None:
        device = "cuda" if torch.cuda.is_available() and "cuda:" in dist.get_backend_config(group) else "cpu"
    if backend_of(group, device) == "gloo":
        return PeerExchange((up, down, control))
    return CollectiveExchange(up, control, sms=ctas if lanes else 0)
