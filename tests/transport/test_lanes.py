"""Lanes: transfers start and arrive in the order of their launch, with threads and without."""

import re
import threading
from collections.abc import Callable
from datetime import timedelta

import pytest

from overlap1f1b.plan import Node, Op
from overlap1f1b.schedule import Kind
from overlap1f1b.transport.exchange import Transfer
from overlap1f1b.transport.failures import Failures, LostRankError
from overlap1f1b.transport.lanes import Lane


def node(microbatch: int) -> Node:
    return Node(Op.DISPATCH, Kind.F, microbatch, block=0)


def lane(*, background: bool, timeout: float = 5.0) -> Lane:
    return Lane("test", Failures(limit=timedelta(seconds=timeout)), background=background)


def starting(started: list[int], number: int, gate: threading.Event | None = None) -> Callable[[], Transfer[int]]:
    def post() -> Transfer[int]:
        if gate is not None:
            gate.wait(5.0)
        started.append(number)
        return Transfer(number)

    return post


@pytest.mark.parametrize("background", [False, True])
def test_transfers_start_in_the_order_of_their_launch(background: bool) -> None:
    started: list[int] = []
    one = lane(background=background)
    flights = [one.launch(node(number), starting(started, number)) for number in range(5)]
    assert [flight.wait() for flight in reversed(flights)] == [4, 3, 2, 1, 0]
    assert started == [0, 1, 2, 3, 4]
    assert all(flight.arrived for flight in flights)
    times = [time for flight in flights for time in (flight.departed_at, flight.arrived_at)]
    assert all(time > 0 for time in times)
    one.close()


def test_a_background_lane_does_not_hold_up_its_caller() -> None:
    started: list[int] = []
    gate, one = threading.Event(), lane(background=True)
    first, second = (one.launch(node(number), starting(started, number, gate)) for number in range(2))
    assert not first.arrived
    assert not second.arrived
    assert started == []
    gate.set()
    assert (second.wait(), first.wait()) == (1, 0)
    one.close()


@pytest.mark.parametrize("background", [False, True])
def test_an_error_of_a_start_is_raised_in_the_wait(background: bool) -> None:
    def fail() -> Transfer[int]:
        raise OSError("no link")

    one = lane(background=background)
    flight = one.launch(node(7), fail)
    pattern = rf"{re.escape(str(node(7)))} on the lane test failed: OSError: no link \(limit 5 s\)"
    with pytest.raises(LostRankError, match=pattern):
        flight.wait()
    one.close()


def test_a_wait_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overlap1f1b.transport.lanes.LOOK_S", 0.02)
    gate, one = threading.Event(), lane(background=True, timeout=0.05)
    flight = one.launch(node(0), starting([], 0, gate))
    with pytest.raises(LostRankError, match=r"TimeoutError: no answer \(limit 0\.05 s\)"):
        flight.wait()
    gate.set()
    one.close()
