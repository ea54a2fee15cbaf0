"""Every tensor that a side stream touches is ordered after its producer, and before its memory's next user.

A wait that is taken out is found, though the values of the play come out right.
"""

import gc
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from overlap1f1b.reduce.sums import Reducer
from overlap1f1b.schedule import build_schedule
from overlap1f1b.transport import loopback
from overlap1f1b.transport.exchange import CollectiveExchange, Transfer
from overlap1f1b.transport.loopback import LoopbackExchange
from overlap1f1b.transport.streams import DeviceStream, EventMark, HostCopy, side_stream
from tests import models
from tests.device import standin
from tests.device.checker import Access, races
from tests.device.model import Entry
from tests.device.standin import Event, Stream, World
from tests.device.steps import COSTS, Layout, batch_of, engine_of, mesh_of, one_at_a_time, program_of
from tests.engines import make
from tests.ranks import over
from tests.reduce.test_ties import MICROBATCHES, build
from tests.tiers import first, wide

# ------------------------------------------------------------------------------------------------ what is played


def _step(rank: int, size: int) -> None:
    """Two stages, two ranks that share experts: rows, counts, stages and reductions; then an optimizer's step."""
    layout, program = Layout(2, 2), program_of("combined_1f1b", 2)
    engine, _ = engine_of(program, layout, verify=False)
    engine.step(*batch_of(program, layout, rank))
    torch.optim.SGD(set(engine.parameters()), lr=0.1, foreach=False).step()


def _step_in_room(rank: int, size: int) -> None:
    """Two ranks that share experts, with a capacity: the experts alone wait for counts."""
    layout, program = Layout(1, 2), program_of("combined_1f1b", 1, 3)
    engine, _ = engine_of(program, layout, capacity=2.0)
    engine.step(*batch_of(program, layout, rank))


def _tied_step(rank: int, size: int) -> None:
    """Two stages that share a parameter."""
    program = build_schedule("1f1b", ranks=2, microbatches=MICROBATCHES)
    held = sorted({stage for _, stage in program.placement.places(rank)})
    mesh = mesh_of(Layout(2, 1))
    with one_at_a_time:
        stages = build(held, 2)
    make(stages, program, mesh=mesh, costs=COSTS, timeout=30).step(*models.batch(MICROBATCHES))


def _loopback_step(rank: int, size: int) -> None:
    """One rank, whose rows go through host memory in many small parts."""
    program = build_schedule("combined_1f1b", microbatches=3)
    exchange = LoopbackExchange(torch.device("cpu"))
    inputs, target = models.batch(3, rows=1, sequence=5)
    make(models.build(layers=1), program, exchange=exchange, costs=COSTS, overlap=3).step(inputs, target=target)


def _offloading_step(rank: int, size: int) -> None:
    """One rank, whose activations leave to host memory: twice, since buffers are used again."""
    program, data = build_schedule("combined_1f1b", microbatches=3), models.batch(3, rows=1, sequence=5)
    engine = make(models.build(layers=1), program, costs=COSTS, overlap=3, offload=True, offload_threshold=0)
    for _ in range(2):
        result = engine.step(data[0], target=data[1])
    assert result.metrics()["offloaded_bytes"] > 0


WORLDS: dict[str, tuple[Callable[[int, int], None], int]] = {
    "stages and experts": (_step, 4),
    "capacity": (_step_in_room, 2),
    "tied": (_tied_step, 2),
    "loopback": (_loopback_step, 1),
    "host memory": (_offloading_step, 1),
}

# ------------------------------------------------------------------------------------------------ waits taken out


def _deliver(event: Event) -> None:
    """Deliver tensors without a wait, so that the play goes on with the right values."""
    for delivery in event.deliveries:
        delivery.settle()


def _no_wait(self: EventMark, timeout: Any = None) -> None:
    _deliver(self.ended.event)


def _not_released(self: Transfer[Any], timeout: Any = None) -> None:
    for work in (*self.led, *self.sends):
        if not isinstance(work, standin._Work):  # a header, on gloo
            work.wait()


def _copied_apart(cls: type[HostCopy], stream: DeviceStream, *tensors: torch.Tensor, behind: Any = None) -> HostCopy:
    if behind is None:
        return original_on(stream, *tensors)
    stream.run(behind, *tensors)
    with stream.stream:  # delivers
        pass
    apart = side_stream(stream.device, "apart")
    return original_on(_Unordered(apart), *tensors)


original_on = HostCopy.on


class _Unordered:
    """A stream whose jobs wait for nothing."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def run(self, job: Any, *tensors: torch.Tensor, after: Any = None) -> Any:
        return self.stream.run(job, *tensors, after=())


def _receive_unwaited(self: Transfer[Any], timeout: Any = None) -> Any:
    for work in self.receives:
        _deliver(work.event)
    if self.mark is not None:
        self.mark.wait(timeout)
    return self.result


def _without_source(rows: Callable[..., Transfer[Any]]) -> Callable[..., Transfer[Any]]:
    return lambda self, *args: replace(rows(self, *args), source=None)


class _Unwaited:
    """A mark or a work whose wait orders nothing."""

    def __init__(self, mark: Any, ended: Any) -> None:
        self.begun, self.ended = getattr(mark, "begun", None), ended
        self._event: Event = getattr(ended, "event", ended)

    def wait(self, timeout: Any = None) -> None:
        _deliver(self._event)

    def is_completed(self) -> bool:
        return False


def _unwaited(transfer: Transfer[Any]) -> Transfer[Any]:
    return replace(transfer, mark=_Unwaited(transfer.mark, transfer.mark.ended))


def _unwaited_counts(counts: Callable[..., Transfer[Any]]) -> Callable[..., Transfer[Any]]:
    return lambda self, *args: _unwaited(counts(self, *args))


def _unwaited_sums(all_reduce: Callable[..., Any]) -> Callable[..., Any]:
    def start(self: Reducer, *args: Any) -> Any:
        post = all_reduce(self, *args)
        return lambda: _unwaited(post())

    return start


def _unwaited_work(allreduce: Callable[..., Any]) -> Callable[..., Any]:
    def start(self: Any, *args: Any) -> Any:
        work = allreduce(self, *args)
        return work if work is None else _Unwaited(None, work.event)

    return start


def _not_free() -> loopback._Buffer:
    """A place in host memory that does not wait until it is free."""

    class Taken(place_class):  # type: ignore[misc, valid-type]
        free = property(lambda self: None, lambda self, mark: None)

    return Taken()


place_class = loopback._Buffer


def _unready(like: DeviceStream, tensor: torch.Tensor, *shape: int) -> torch.Tensor:
    return tensor.new_empty(shape)


BOTH = "stages and experts"
REMOVALS: dict[str, tuple[Any, ...]] = {
    "the way out waits for rows": ("loopback", Stream, "wait_stream", lambda self, other: None),
    "compute waits for rows": (BOTH, EventMark, "wait", _no_wait),
    "a job waits for what was computed before": (BOTH, Stream, "wait_stream", lambda self, other: None),
    "the host waits for the copies of counts": (BOTH, EventMark, "synchronize", lambda self, *limits: None),
    "counts are copied behind their exchange": (BOTH, HostCopy, "on", classmethod(_copied_apart)),
    "a sent tensor is freed when it is sent": (BOTH, Transfer, "release", _not_released),
    "compute waits for a received tensor": (BOTH, Transfer, "receive", _receive_unwaited),
    "rows live until they are exchanged": (BOTH, CollectiveExchange, "rows", _without_source(CollectiveExchange.rows)),
    "experts wait for counts under a capacity": (
        "capacity",
        CollectiveExchange,
        "counts",
        _unwaited_counts(CollectiveExchange.counts),
    ),
    "gradients wait for their sum": (BOTH, Reducer, "_all_reduce", _unwaited_sums(Reducer._all_reduce)),
    "tied gradients wait for their sum": (
        "tied",
        standin.StandInGroup,
        "allreduce",
        _unwaited_work(standin.StandInGroup.allreduce),
    ),
    "early rows have memory of their own": (BOTH, DeviceStream, "empty", _unready),
    "the way back waits for the way out": ("loopback", Event, "wait", lambda self, stream=None: None),
    "a place is filled when it is free": ("loopback", loopback, "_Buffer", _not_free),
    "what leaves stays until its copy has ended": ("host memory", EventMark, "wait", _no_wait),
    "a copy waits for what was computed before": ("host memory", Stream, "wait_stream", lambda self, other: None),
}  # fmt: skip
"""The world in which a wait matters, and what is replaced: owner, name and value."""


def _races(what: str, *replaced: Any) -> list[str]:
    """Races of a world, in which a wait may be replaced: owner, name and value."""
    function, ranks = WORLDS[what]
    world = World(ranks)
    with patch.object(loopback, "LEAST_BYTES", 256), patch.object(*replaced) if replaced else nullcontext():
        world.run(function, watch=True)
    return [str(race) for number, log in enumerate(world.logs) for race in races(number, log)]


@pytest.mark.parametrize("what", first(WORLDS, "stages and experts"))
@over(1)
def test_everything_is_ordered(rank: int, size: int, what: str) -> None:
    assert not (found := _races(what)), found


@pytest.mark.parametrize("removal", first(REMOVALS, "the way out waits for rows"))
@over(1)
def test_a_wait_that_is_taken_out_is_found(rank: int, size: int, removal: str) -> None:
    assert _races(*REMOVALS[removal])


def _unread_counts(rank: int, size: int, holds: bool) -> None:
    """Counts on their way to the host that nobody reads, as after a failure of a step."""
    exchange = loopback.LoopbackExchange(torch.device("cpu"))
    if not holds:
        exchange._copies = deque(maxlen=0)
    counts = torch.tensor([3, 1])
    transfer = exchange.counts(counts)
    transfer.host = None
    gc.collect()
    counts.add(1)  # the checker looks for freed memory at each operation


@pytest.mark.parametrize("holds", [True, *wide(False)])
@over(1)
def test_counts_that_nobody_reads(rank: int, size: int, holds: bool) -> None:
    """Torch would give their host memory away, and does not know of the kernel that is still to write to it."""
    world = World(1)
    world.run(_unread_counts, holds, watch=True)
    found = [str(race) for race in races(0, world.logs[0])]
    assert any("stream host" in race for race in found) != holds, found


# ------------------------------------------------------------------------------------------------ by hand


def _kernel(stream: int, *accesses: Access) -> Entry:
    return Entry("kernel", ((stream, stream), "a kernel", accesses))


WRITTEN, READ, BESIDE = Access(1, 0, 8, True), Access(1, 4, 12, False), Access(1, 8, 12, False)
ORDER = [Entry("record", ((0, 0), 1)), Entry("wait", ((1, 1), 1))]


def test_an_event_orders_two_streams() -> None:
    assert races(0, [_kernel(0, WRITTEN), _kernel(1, READ)])
    assert not races(0, [_kernel(0, WRITTEN), *ORDER, _kernel(1, READ)])
    assert races(0, [*ORDER, _kernel(0, WRITTEN), _kernel(1, READ)])
    assert not races(0, [_kernel(0, WRITTEN), _kernel(1, BESIDE)])
    assert not races(0, [_kernel(0, READ), _kernel(1, READ)])


def test_a_host_that_has_waited_orders_what_it_launches() -> None:
    entries = [_kernel(0, WRITTEN), Entry("record", ((0, 0), 1)), Entry("block", (1,)), _kernel(1, READ)]
    assert not races(0, entries)
    assert races(0, [*entries[:2], *entries[3:]])


def test_memory_is_freed_behind_its_last_use() -> None:
    used = [_kernel(0, WRITTEN), *ORDER, _kernel(1, READ)]
    free = Entry("free", (1,))
    assert races(0, [*used, free])
    assert not races(0, [*used, Entry("record", ((1, 1), 2)), Entry("wait", ((0, 0), 2)), free])
