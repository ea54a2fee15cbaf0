"""The expert all-to-all: who sends how many rows to whom, and the transfers themselves, outside autograd."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Transfer:
    """An exchange that has been launched.

    Args:
        result: What is received; valid after :meth:`receive`.
        receives: Works that fill ``result``.
        sends: Works that read ``source``, which lives as long as the transfer.
        source: What is sent.
    """

    result: Tensor
    receives: Sequence[dist.Work] = ()
    sends: Sequence[dist.Work] = ()
    source: Tensor | None = None

    def receive(self, timeout: timedelta | None = None) -> Tensor:
        """Waits for the rows (on CUDA the current stream does) and returns them. Once only: gloo hangs on a second."""
        _wait(self.receives, timeout)
        return self.result

    def release(self, timeout: timedelta | None = None) -> None:
        """Waits until what was sent may be overwritten."""
        _wait(self.sends, timeout)

    def finish(self, timeout: timedelta | None = None) -> Tensor:
        """Waits for both."""
        self.receive(timeout)
        self.release(timeout)
        return self.result


def _wait(works: Sequence[dist.Work], timeout: timedelta | None) -> None:
    for work in works:
        work.wait(timeout) if timeout is not None else work.wait()


class Exchange(Protocol):
    """Uneven all-to-all over the ranks of a group; its backward is itself with the sizes swapped."""

    ranks: int
    rank: int
    background: bool
    """Whether a transfer is best started and awaited by a thread of its own."""

    def rows(self, source: Tensor, send: Sequence[int], receive: Sequence[int]) -> Transfer:
        """Launches the exchange of ``source [sum(send), H]``, whose parts go to the ranks in order.

        The transfer's result is ``[sum(receive), H]``, the parts of the ranks in order.
        """

    def counts(self, counts: Tensor) -> Transfer:
        """Launches the exchange of ``counts [E]``; the result ``[ranks, E / ranks]`` has a row for each source rank."""


class LocalExchange:
    """One rank: everything stays where it is."""

    ranks = 1
    rank = 0
    background = False

    def rows(self, source: Tensor, send: Sequence[int], receive: Sequence[int]) -> Transfer:
        return Transfer(source)

    def counts(self, counts: Tensor) -> Transfer:
        return Transfer(counts.view(1, -1))


class PeerExchange:
    """A posted receive and a send for every peer: full duplex on gloo, whose ``all_to_all_single`` is nearly half.

    gloo sends a payload once the receiver has announced its receive, and the announcement queues behind whatever the
    receiver sends on the same connection. So each direction has a connection of its own, and counts a third, or the
    lighter direction of an exchange would wait for the heavier one, and counts for everything.

    Args:
        groups: Three groups of the same ranks: rows to higher ranks, rows to lower ranks, counts. Equal ones work too.
    """

    background = True

    def __init__(self, groups: tuple[dist.ProcessGroup, dist.ProcessGroup, dist.ProcessGroup]) -> None:
        self.up, self.down, self.control = groups
        self.ranks, self.rank = self.up.size(), self.up.rank()

    def rows(self, source: Tensor, send: Sequence[int], receive: Sequence[int]) -> Transfer:
        source = source.contiguous()
        result = source.new_empty((sum(receive), *source.shape[1:]))
        parts = source.split(list(send)), result.split(list(receive))
        return self._launch(*parts, result, source, self.up, self.down)

    def counts(self, counts: Tensor) -> Transfer:
        source = counts.view(self.ranks, -1)
        result = torch.empty_like(source)
        return self._launch(source.unbind(), result.unbind(), result, source, self.control, self.control)

    def _launch(
        self,
        send: Sequence[Tensor],
        receive: Sequence[Tensor],
        result: Tensor,
        source: Tensor,
        up: dist.ProcessGroup,
        down: dist.ProcessGroup,
    ) -> Transfer:
        # Each rank starts with its next neighbour, so that not all of them send to the same one first.
        peers = [(self.rank + step) % self.ranks for step in range(1, self.ranks)]
        receives = [
            _launched(dist.irecv(receive[p], group=up if p < self.rank else down, group_src=p))
            for p in reversed(peers)
            if receive[p].numel()
        ]
        sends = [
            _launched(dist.isend(send[p], group=up if self.rank < p else down, group_dst=p))
            for p in peers
            if send[p].numel()
        ]
        receive[self.rank].copy_(send[self.rank])
        return Transfer(result, receives, sends, source)


class CollectiveExchange:
    """torch's ``all_to_all_single``: on NCCL it runs on the group's own stream, and waiting is an event."""

    background = False

    def __init__(self, rows_group: dist.ProcessGroup, counts_group: dist.ProcessGroup) -> None:
        self.rows_group, self.counts_group = rows_group, counts_group
        self.ranks, self.rank = rows_group.size(), rows_group.rank()

    def rows(self, source: Tensor, send: Sequence[int], receive: Sequence[int]) -> Transfer:
        source = source.contiguous()
        result = source.new_empty((sum(receive), *source.shape[1:]))
        work = dist.all_to_all_single(
            result, source, list(receive), list(send), group=self.rows_group, async_op=True
        )
        return Transfer(result, [_launched(work)], source=source)

    def counts(self, counts: Tensor) -> Transfer:
        source = counts.view(self.ranks, -1)
        result = torch.empty_like(source)
        work = dist.all_to_all_single(result, source, group=self.counts_group, async_op=True)
        return Transfer(result, [_launched(work)], source=source)


def _launched(work: dist.Work | None) -> dist.Work:
    assert work is not None, "a rank only exchanges with members of its group"
    return work


def build_exchange(group: dist.ProcessGroup | None, *, lanes: bool = False) -> Exchange:
    """The exchange that suits a group: local without one, peer to peer on gloo, a collective on NCCL.

    With ``lanes`` it makes groups of its own (every rank must call it): it shares no queue with anything else, and
    rows and counts share none with each other.
    """
    if group is None or group.size() == 1:
        return LocalExchange()

    def lane() -> dist.ProcessGroup:
        if not lanes:
            return group
        return dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)

    if dist.get_backend(group) == "gloo":
        return PeerExchange((lane(), lane(), lane()))
    return CollectiveExchange(lane(), lane())
