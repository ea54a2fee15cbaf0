"""What the benchmark measures beside an engine on a device."""

import torch
import torch.distributed as dist

from overlap1f1b.running.exchanges import AnsweringExchange, Replay, Sizes
from overlap1f1b.transport.exchange import CollectiveExchange
from tests.device.model import Entry
from tests.device.standin import World, here
from tests.ranks import over

CPU = torch.device("cpu")


def _replayed(rank: int, size: int) -> list[Entry]:
    group = dist.group.WORLD
    sizes = [Sizes((1,) * size, (1,) * size, (3,), torch.float32)] * 6
    replay = Replay(CollectiveExchange(group, group), sizes, CPU, depth=2)
    begin = len(here().log)
    replay.run()
    return here().log[begin:]


@over(1)
def test_replayed_exchanges_and_compute_do_not_wait_for_each_other(rank: int, size: int) -> None:
    for log in World(2).run(_replayed):
        assert not [entry for entry in log if entry.kind in ("wait", "record", "comm") and entry.args[0] == (0, 0)]
        assert sum(entry.kind == "comm" for entry in log) == 6


def _answered(rank: int, size: int) -> tuple[list[list[int]], list[Entry]]:
    answers = AnsweringExchange(2, 0, {7: torch.tensor([[1, 2], [3, 4]])})
    transfer = answers.counts(torch.tensor([5, 6, 7, 8]), 7)
    copies = [tensor.flatten().tolist() for tensor in transfer.host.read()]
    assert answers.counts(torch.tensor([5, 6, 7, 8]), 7, None, False).host is None
    return copies, [entry for entry in here().log if entry.kind == "block"]


@over(1)
def test_the_host_reads_answered_counts_from_a_copy(rank: int, size: int) -> None:
    ((copies, blocked),) = World(1).run(_answered)
    assert copies == [[5, 6, 7, 8], [1, 2, 3, 4]]
    assert len(blocked) == 1


def test_an_answer_carries_what_was_recorded_where_it_is_as_long() -> None:
    """Behind answered zeros the next layer chooses others: what comes back to it is as much as it has sent then."""
    answers = AnsweringExchange(2, 0, {}, {7: torch.ones(3, 2)})
    source = torch.randn(4, 5)
    assert answers.rows(source, [2, 2], [1, 2], 7).result.tolist() == [[0, 0, 0, 1, 1]] * 3
    assert answers.rows(source, [2, 2], [2, 2], 7).result.tolist() == [[0] * 5] * 4
