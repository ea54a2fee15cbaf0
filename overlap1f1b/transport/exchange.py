"""The expert all-to-all, outside autograd.

An :class:`Exchange` starts transfers between the ranks that share experts: first the counts, that is how many rows each
rank sends to each expert, then the rows. A :class:`Transfer` is one transfer under way. :func:`build_exchange` chooses
the kind; :class:`~overlap1f1b.transport.loopback.LoopbackExchange` stands in for a network on one GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Generic, Protocol, Self, TypeVar, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from overlap1f1b.schedule.values import check_kind
from overlap1f1b.transport import devices
from overlap1f1b.transport.budget import DEFAULT_CTAS
from overlap1f1b.transport.groups import Group, Groups, abort, backend_of, close, side_by_side
from overlap1f1b.transport.streams import HostCopy, Mark, SideStream, side_stream

T_co = TypeVar("T_co", covariant=True)


@dataclass(slots=True)
class Transfer(Generic[T_co]):
    """Tensors under way between ranks."""

    result: T_co  # received tensors; valid after :meth:`receive`
    receives: Sequence[dist.Work] = ()  # works that fill ``result``
    sends: Sequence[dist.Work] = ()  # works that read ``source``
    source: Tensor | Sequence[Tensor] | None = None  # sent tensors; kept until the transfer is dropped
    ahead: Self | None = None  # earlier on the same links, waited for first, so that this is timed alone
    mark: Mark | None = None  # end of the transfer on a stream, if it has no works
    host: HostCopy | None = None  # copies of sent and received counts on the way to the host, for a transfer of counts
    led: Sequence[dist.Work] = ()  # works that have ended when one of ``sends`` has; gloo's need a wait all the same
    sent: int = 0  # bytes that leave this rank; 0 if nobody has said

    def receive(self, timeout: timedelta | None = None) -> T_co:
        """Wait for the result and return it; on a GPU the current stream waits.

        Call it only once: gloo hangs on a second wait.
        """
        _wait(self.receives, timeout)
        if self.mark is not None:
            self.mark.wait(timeout)
        return self.result

    def release(self, timeout: timedelta | None = None) -> None:
        """Wait until ``source`` may be overwritten."""
        if self.ahead is not None:
            self.ahead.release(timeout)
        _wait((*self.led, *self.sends), timeout)

    @property
    def at_once(self) -> bool:
        """Whether there is nothing to wait for."""
        return self.mark is None and self.ahead is None and not self.receives and not self.sends

    @property
    def done(self) -> bool:
        """Whether everything is received and sent."""
        ended = self.mark is None or self.mark.is_completed()
        return ended and all(work.is_completed() for work in (*self.receives, *self.sends))

    def finish(self, timeout: timedelta | None = None) -> T_co:
        """Wait until everything is received and sent, and return the result."""
        self.receive(timeout)
        self.release(timeout)
        return self.result


def _wait(works: Sequence[dist.Work], timeout: timedelta | None) -> None:
    for work in works:
        work.wait(timeout) if timeout is not None else work.wait()


Sizes = Sequence[int]
"""Rows to or from each rank."""
_Sides = tuple[list[int], list[int]]  # rows from each rank, and to each
_EQUAL: _Sides = ([], [])
"""Sizes of a collective with equal parts."""


@runtime_checkable
class Exchange(Protocol):
    """Uneven all-to-all over the ranks of a group. Its backward is an exchange with the sizes swapped.

    A ``tag`` distinguishes exchanges that are in flight together; exchanges with the same tag match in order.

    Attributes:
        ranks: Number of ranks.
        rank: This rank's number among them.
        background: Whether a separate thread should start and await a transfer.
        sms: Multiprocessors of a GPU that a transfer occupies while it is in flight.
    """

    ranks: int
    rank: int
    background: bool = False
    sms: int = 0

    def rows(
        self,
        source: Tensor,
        send: Sizes,
        receive: Sizes,
        tag: int = 0,
        expected: Transfer[Tensor] | None = None,
        ready: Mark | None = None,
        /,
    ) -> Transfer[Tensor]:
        """Launch the exchange of ``source [sum(send), H]``: its first ``send[0]`` rows go to rank 0, and so on.

        The transfer's result is ``[sum(receive), H]``: the first ``receive[0]`` rows are from rank 0, and so on. On a
        device it starts behind all that was computed so far, or behind ``ready``, where the rows were there already.
        """
        ...

    def counts(
        self, counts: Tensor, tag: int = 0, expected: Transfer[Tensor] | None = None, read: bool = True, /
    ) -> Transfer[Tensor]:
        """Launch the exchange of ``counts [E]``; the result ``[ranks, E / ranks]`` has a row for each source rank.

        With ``read`` the host is going to read the counts, so that a device copies them to it at once.
        """
        ...

    def abort(self, *, ending: bool = False) -> None:
        """End every transfer under way; the exchange cannot be used any more.

        Groups that the user made are left alone unless the process is ``ending``.
        """
        return None

    def expect_rows(self, like: Tensor, receive: Sizes, tag: int, /) -> Transfer[Tensor] | None:
        """Post the receive of the ``rows`` of this tag, with width and dtype of ``like``; None if it gains nothing.

        A peer that is ahead can then send at once, and drift between ranks costs no time on the wire.
        """
        return None

    def expect_counts(self, like: Tensor, tag: int, /) -> Transfer[Tensor] | None:
        """Post the receive of the ``counts`` of this tag, as many as ``like``; None if it gains nothing."""
        return None


class LocalExchange(Exchange):
    """Exchange of one rank: rows and counts stay in place."""

    ranks = 1
    rank = 0

    def rows(self, source: Tensor, *_: Any) -> Transfer[Tensor]:
        return Transfer(source)

    def counts(self, counts: Tensor, *_: Any) -> Transfer[Tensor]:
        return Transfer(counts.view(1, -1))


class PeerExchange(Exchange):
    """A posted receive and a send for every peer: full duplex on gloo; its ``all_to_all_single`` is nearly half duplex.

    gloo sends a payload after the receiver has announced its receive, and the announcement queues behind the receiver's
    own sends on the same connection. So rows to higher ranks, rows to lower ranks, and counts have three ``groups`` of
    the same ranks. Else the lighter direction would wait for the heavier one, and counts for both.
    """

    background = True

    def __init__(self, groups: tuple[Group, Group, Group]) -> None:
        self._groups = groups
        self._rows, self._control = groups[:2], (groups[2], groups[2])
        self.ranks, self.rank = groups[0].size(), groups[0].rank()
        # Each rank starts with its next neighbour: otherwise all would send to the same rank first.
        self.peers = [(self.rank + step) % self.ranks for step in range(1, self.ranks)]

    def abort(self, *, ending: bool = False) -> None:
        for group in self._groups:
            if ending or isinstance(group, dist.ProcessGroupGloo):  # others are the user's
                abort(group)

    def rows(
        self, source: Tensor, send: Sizes, receive: Sizes, tag: int = 0, expected: Any = None, *_: Any
    ) -> Transfer[Tensor]:
        return self._to_peers(source.contiguous(), send, receive, tag, expected, self._rows)

    def counts(
        self, counts: Tensor, tag: int = 0, expected: Transfer[Tensor] | None = None, *_: Any
    ) -> Transfer[Tensor]:
        ones = [1] * self.ranks
        return self._to_peers(counts.view(self.ranks, -1), ones, ones, tag, expected, self._control)

    def expect_rows(self, like: Tensor, receive: Sizes, tag: int) -> Transfer[Tensor]:
        return self._receive(like, receive, tag, self._rows)

    def expect_counts(self, like: Tensor, tag: int) -> Transfer[Tensor]:
        return self._receive(like.view(self.ranks, -1), [1] * self.ranks, tag, self._control)

    def _receive(self, like: Tensor, receive: Sizes, tag: int, groups: Sequence[Group]) -> Transfer[Tensor]:
        (up, down), result = groups, like.new_empty((sum(receive), *like.shape[1:]))
        parts = result.split(list(receive))
        works = [(up if p < self.rank else down).recv([parts[p]], p, tag) for p in reversed(self.peers) if receive[p]]
        return Transfer(result, works)

    def _to_peers(
        self, source: Tensor, send: Sizes, receive: Sizes, tag: int, expected: Any, groups: Sequence[Group]
    ) -> Transfer[Tensor]:
        """Send rows to each peer behind posted receives; copy those that stay."""
        posted: Transfer[Tensor] = expected or self._receive(source, receive, tag, groups)
        (up, down), parts = groups, source.split(list(send))
        works = [(up if self.rank < p else down).send([parts[p]], p, tag) for p in self.peers if send[p]]
        posted.result.split(list(receive))[self.rank].copy_(parts[self.rank])
        return Transfer(posted.result, posted.receives, works, source, sent=source.nbytes - parts[self.rank].nbytes)


class CollectiveExchange(Exchange):
    """torch's ``all_to_all_single``; on NCCL on two streams of high priority, one for rows and one for counts.

    A collective with ``async_op=False`` runs on the current stream. So this class makes one of its streams current for
    the call, and records two events that give its times. Counts are then copied to the host on their stream. The group
    of the counts has a queue of its own; a transfer may occupy ``sms`` multiprocessors, see :func:`own_exchange`.
    """

    def __init__(self, rows_group: Group, counts_group: Group, sms: int = 0) -> None:
        self._groups, self.sms = (rows_group, counts_group), sms
        self._streams: tuple[SideStream, ...] = ()
        self.ranks, self.rank = rows_group.size(), rows_group.rank()

    def warm_up(self, device: torch.device) -> None:
        """Make the communicators of both groups; all ranks must call this."""
        one, ones = torch.zeros(self.ranks, device=device), [1] * self.ranks
        self.rows(one, ones, ones).finish()  # NCCL connects pairs of ranks in their first exchange
        self.counts(one, 0, None, False).finish()

    def abort(self, *, ending: bool = False) -> None:
        side_by_side([partial(abort, group) for group in self._groups])

    def close(self) -> None:
        """End both groups unless they are the user's; all ranks must call this, after everything has ended."""
        for group in self._groups:
            close(group)

    def rows(
        self, source: Tensor, send: Sizes, receive: Sizes, tag: int = 0, expected: Any = None, ready: Mark | None = None
    ) -> Transfer[Tensor]:
        if not source.is_contiguous():  # compute copies it
            source, ready = source.contiguous(), None
        shape, splits = (sum(receive), *source.shape[1:]), (list(receive), list(send))
        result = source.new_empty(shape) if ready is None else self._beside(source)[0].empty(source, *shape)
        return self._launched(0, splits, result, source, after=None if ready is None else (ready,))

    def counts(
        self, counts: Tensor, tag: int = 0, expected: Transfer[Tensor] | None = None, read: bool = True
    ) -> Transfer[Tensor]:
        """Exchange the counts; if they are read, a stream copies them to the host behind it."""
        source = counts.view(self.ranks, -1)
        result = torch.empty_like(source)
        if not read:
            return self._launched(1, _EQUAL, result, source)

        def send(source: Tensor, result: Tensor) -> None:
            _all_to_all(result, source, self._groups[1], _EQUAL)

        # The route keeps source and result until it has read the copies.
        host = HostCopy.on(self._beside(source)[1], source, result, behind=send)
        return Transfer(result, source=source, mark=host.mark, host=host, sent=source[1:].nbytes)

    def _launched(
        self, lane: int, splits: _Sides, result: Tensor, source: Tensor, after: tuple[Mark] | None = None
    ) -> Transfer[Tensor]:
        """Launch a collective of rows, 0, or of counts, 1, on its stream."""
        exchange = partial(_all_to_all, group=self._groups[lane], splits=splits)
        rows = splits[1] or [1] * self.ranks
        sent = source.nbytes * (sum(rows) - rows[self.rank]) // max(1, sum(rows))
        # Source and result outlive the exchange: the transfer holds both, and its holder waits for the end first.
        mark = self._beside(source)[lane].run(exchange, result, source, after=after)
        return Transfer(result, source=source, mark=mark, sent=sent)

    def _beside(self, tensor: Tensor) -> tuple[SideStream, ...]:
        """Return the streams of rows and of counts."""
        if not self._streams:
            rows = side_stream(tensor.device, "rows")
            # A CPU has one thread for both, since they may share a group, whose collectives have one order.
            counts = rows if devices.gpu_of(tensor.device) is None else side_stream(tensor.device, "counts")
            self._streams = rows, counts
        return self._streams


def _all_to_all(result: Tensor, source: Tensor, group: Group, splits: _Sides) -> None:
    """Call a group as ``torch.distributed.all_to_all_single`` does, on the current stream.

    ``splits`` are the rows from each rank and the rows to each rank, or :data:`_EQUAL`.

    After an error torch's function asks which backend the group has. It does not know groups of :class:`Groups`, and so
    would raise another error, from which nobody learns that a rank was lost.
    """
    options = dist.AllToAllOptions()
    options.asyncOp = False
    result, source = (torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in (result, source))
    work = group.alltoall_base(result, source, *splits, options)
    if work is not None:  # a backend that knows no option asyncOp
        work.wait()


def build_exchange(group: Group | None, *, device: str | None = None) -> Exchange:
    """Return the exchange that suits a group: local for one rank, None; peer to peer on gloo; a collective on NCCL.

    All transfers share the group. ``device`` is the type whose tensors travel, by default a GPU's if there is one and
    the group has a backend for it. ValueError if it is no process group.
    """
    check_kind("group", group, dist.ProcessGroup, None)
    if group is None or group.size() == 1:
        return LocalExchange()
    if backend_of(group, device or _carried_by(group)) == "gloo":
        return PeerExchange((group, group, group))
    return CollectiveExchange(group, group)


def own_exchange(
    group: Group | None, ctas: int = DEFAULT_CTAS, *, limit: timedelta | None = None, device: str | None = None
) -> Exchange:
    """Return the exchange that suits a group, over new groups of its ranks, all of which must call this.

    On gloo each direction of rows and the counts have a queue of their own, on NCCL rows and counts; there a transfer
    of rows has at most ``ctas`` thread blocks, each on a multiprocessor. Waits end at the ``limit``, or the default
    group's.
    """
    if group is None or group.size() == 1:
        return LocalExchange()
    ranks = dist.get_process_group_ranks(group)
    groups = Groups(ranks, limit, device=device or _carried_by(group))
    if groups.backend == "gloo":
        up, down, counts = (groups.new(ranks, purpose) for purpose in ("rows up", "rows down", "counts"))
        return PeerExchange((up, down, counts))
    return CollectiveExchange(groups.new(ranks, "rows", ctas=ctas), groups.new(ranks, "counts", ctas=1), sms=ctas)


def _carried_by(group: Group) -> str:
    """Return the type of the device whose tensors a group is for, if nobody says it."""
    kind = devices.present().type
    return kind if f"{kind}:" in dist.get_backend_config(group) else "cpu"
