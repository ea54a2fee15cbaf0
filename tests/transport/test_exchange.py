"""Exchanges bring every row to its place, whatever carries them and whoever is ahead."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap1f1b.transport.exchange import (
    CollectiveExchange,
    Exchange,
    LocalExchange,
    PeerExchange,
    Transfer,
    build_exchange,
    own_exchange,
)
from tests.ranks import Ranks, over
from tests.tiers import wide

H = 3


def sizes(size: int, tag: int) -> list[list[int]]:
    """Rows from each rank (first index) to each other; some are none."""
    return [[(source * 3 + to * 5 + tag) % 4 for to in range(size)] for source in range(size)]


def part(source: int, to: int, rows: int, tag: int) -> torch.Tensor:
    """Rows that say where they come from and go to."""
    return torch.arange(rows * H, dtype=torch.float32).view(rows, H) + 100 * source + 1000 * to + 10_000 * tag


def build(kind: str) -> Exchange:
    group = dist.group.WORLD
    if kind == "collective":
        return CollectiveExchange(group, dist.new_group())
    return build_exchange(group) if kind == "shared" else own_exchange(group)


def exchanged(rank: int, size: int, kind: str, announced: bool) -> list[bool]:
    exchange = build(kind)
    assert (exchange.rank, exchange.ranks) == (rank, size)
    assert isinstance(exchange, CollectiveExchange if kind == "collective" else PeerExchange)
    flying, right = [], []
    for tag in range(3):
        table = sizes(size, tag)
        send, receive = table[rank], [row[rank] for row in table]
        source = torch.cat([part(rank, to, rows, tag) for to, rows in enumerate(send)])
        counts = torch.arange(2 * size) + 100 * rank + 10_000 * tag
        ahead = exchange.expect_rows(source, receive, tag) if announced else None
        control = exchange.expect_counts(counts, 100 + tag) if announced else None
        assert (ahead is not None) == (control is not None) == (announced and kind != "collective")
        flying.append((exchange.counts(counts, 100 + tag, control), exchange.rows(source, send, receive, tag, ahead)))
        leaving = source[: sum(send) - send[rank]].nbytes
        assert (flying[-1][0].sent, flying[-1][1].sent) == (counts[2:].nbytes, leaving)
    for tag, (control, rows) in enumerate(flying):
        wanted = torch.cat([part(source, rank, sizes(size, tag)[source][rank], tag) for source in range(size)])
        right.append(torch.equal(rows.finish(), wanted))
        mine = torch.arange(2 * rank, 2 * rank + 2)
        wanted = torch.stack([mine + 100 * source + 10_000 * tag for source in range(size)])
        right.append(torch.equal(control.finish(), wanted))
    return right


@pytest.mark.parametrize("size", [2, *wide(4)])
@pytest.mark.parametrize(
    ("kind", "announced"),
    [("own", True), *wide(("own", False), ("shared", False), ("shared", True), ("collective", False))],
)
def test_rows_and_counts_arrive(kept: dict[int, Ranks], size: int, kind: str, announced: bool) -> None:
    """Three exchanges of rows and of counts in flight together."""
    assert kept[size].run(exchanged, kind, announced) == [[True] * 6] * size


def test_one_rank_keeps_what_it_has() -> None:
    exchange = build_exchange(None)
    assert isinstance(exchange, LocalExchange)
    rows, counts = torch.randn(4, H), torch.tensor([1, 0, 3])
    assert exchange.rows(rows, [4], [4]).finish() is rows
    assert torch.equal(exchange.counts(counts, 7).finish(), counts[None])
    assert exchange.expect_rows(rows, [4], 0) is None
    assert exchange.expect_counts(counts, 0) is None


def test_a_header_does_not_delay_the_end_of_a_transfer() -> None:
    """gloo's send of a header counts as ended only when it was waited for."""
    waited: list[str] = []

    def work(name: str, ended: bool) -> Any:
        return SimpleNamespace(is_completed=lambda: ended, wait=lambda *_: waited.append(name))

    transfer = Transfer(None, sends=[work("payload", True)], led=[work("header", False)])
    assert transfer.done
    transfer.release()
    assert waited == ["header", "payload"]
    assert not Transfer(None, sends=[work("header", False)]).done


class Lost(dist.ProcessGroup):
    """A group that torch does not know, whose other rank is gone."""

    def alltoall_base(self, *_: Any) -> Any:
        raise dist.DistBackendError("NCCL error: ncclRemoteError")

    all_to_all_single = alltoall_base


@over(2)
def test_an_error_of_a_collective_stays_what_it_is(rank: int, size: int) -> None:
    """Torch looks up the group after an error, and would raise that it does not know it."""
    group, source = Lost(rank, size), torch.ones(size, H)
    with pytest.raises(dist.DistBackendError, match=r"^NCCL error: ncclRemoteError$"):
        CollectiveExchange(group, group).rows(source, [1] * size, [1] * size).finish()
