"""The model hangs where CUDA and NCCL would, and nowhere else."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from tests.device.model import Entry, Setting, hangs

ONE_QUEUE = Setting(queue_of=lambda rank, stream: 0)
SYNCS = Setting(sync_at=lambda rank, node: True)
EAGER = Setting(lazy=False)


class Host:
    """Writes what a host does, by hand."""

    def __init__(self) -> None:
        self.log: list[Entry] = []
        self.events = 0

    def write(self, kind: str, *args: Any) -> Host:
        self.log.append(Entry(kind, args))
        return self

    def node(self) -> Host:
        return self.write("node", "a node")

    def transfer(self, stream: int, meeting: Hashable, communicator: Hashable = "c") -> Host:
        """A transfer between two ranks on a stream."""
        return self.write("comm", (stream, stream), (communicator, communicator), meeting, 2, "", [])

    def record(self, stream: int) -> int:
        self.events += 1
        self.write("record", (stream, stream), self.events)
        return self.events

    def wait(self, stream: int, event: int) -> Host:
        return self.write("wait", (stream, stream), event)


def test_a_transfer_waits_for_its_peer_alone() -> None:
    one, other = Host().transfer(1, "a").node(), Host().node().transfer(1, "a")
    assert not hangs([one.log, other.log])
    assert not hangs([one.log, other.log], SYNCS)
    assert [stuck.rank for stuck in hangs([one.log, []])] == [0]


def test_a_stream_runs_its_operations_in_order() -> None:
    """Two transfers that both ranks launch in the other's order."""
    one, other = Host().transfer(1, "a", "c").transfer(1, "b", "d"), Host().transfer(1, "b", "d").transfer(1, "a", "c")
    assert len(hangs([one.log, other.log])) == 2
    apart = Host().transfer(1, "b", "d").transfer(2, "a", "c")
    assert not hangs([Host().transfer(1, "a", "c").transfer(2, "b", "d").log, apart.log])


def test_a_communicator_has_one_operation_at_a_time() -> None:
    one, other = Host().transfer(1, "a").transfer(2, "b"), Host().transfer(1, "b").transfer(2, "a")
    assert len(hangs([one.log, other.log])) == 2


def _waits() -> tuple[Host, Host]:
    """A receive that is posted before its rank sends what the peer needs for its own send."""
    one, other = Host(), Host()
    one.transfer(1, "there", "down")
    arrived = one.record(1)
    one.node().transfer(2, "here", "up").wait(0, arrived).write("block", one.record(0))
    other.transfer(2, "here", "up")
    arrived = other.record(2)
    other.wait(1, arrived).transfer(1, "there", "down")
    return one, other


def test_a_device_wide_sync_waits_for_what_was_posted_ahead() -> None:
    logs = [host.log for host in _waits()]
    assert not hangs(logs)
    (first, _) = hangs(logs, SYNCS)
    assert first.waits == "a device-wide sync"


def test_streams_that_share_a_queue_wait_for_each_other() -> None:
    """The wait of the first stream holds up the second, which would send what it waits for."""
    one, other = Host(), Host()
    one.transfer(1, "there", "down")
    arrived = one.record(1)
    one.wait(0, arrived).transfer(2, "here", "up")
    other.transfer(2, "here", "up")
    other.wait(1, other.record(2)).transfer(1, "there", "down")
    logs = [one.log, other.log]
    assert not hangs(logs)
    assert len(hangs(logs, ONE_QUEUE)) == 2
    assert not hangs(logs, Setting(queue_of=lambda rank, stream: stream == 2))


def test_the_first_transfer_of_a_lazy_communicator_blocks_its_host() -> None:
    def host(first: str, second: str) -> list[Entry]:
        log = Host()
        for number, name in enumerate((first, second)):
            log.write("create", name, 2).transfer(number, name, name)
        return log.log

    logs = [host("up", "down"), host("down", "up")]
    assert [stuck.waits for stuck in hangs(logs)] == ["others, to create up", "others, to create down"]
    assert not hangs(logs, EAGER)


def test_hosts_wait_for_hosts() -> None:
    logs = [Host().write("meet", "key", 2).log for _ in range(2)]
    assert hangs([logs[0], []])
    assert not hangs(logs)
