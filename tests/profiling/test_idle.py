"""Idle time counts for one reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlap1f1b.profiling import figures_of, read_file
from tests.profiling.synthetic import COMPUTE, EXCHANGE, PEER, Events, Kernel, Range, write_chrome

STEP = Range("o1 step 1", 0, 100)
FIRST, LAST = Range("o1 dense.f[0] m0", 0, 5), Range("o1 dense.b[0] m0", 20, 25)
RECEIVE = Range("o1 receive.b[0] m0", 10, 12)


def idle(folder: Path, *, ranges: tuple[Range, ...], kernels: tuple[Kernel, ...] = ()) -> tuple[int, int, int]:
    """For exchange, pipeline and host."""
    (recording,) = read_file(write_chrome(folder / "a.json", Events([STEP, *ranges], list(kernels))))
    first, second, third = figures_of(recording).idle.values()
    return first, second, third


def device(*kernels: Kernel) -> tuple[Kernel, ...]:
    """From 0 to 200: compute at both ends."""
    return Kernel(COMPUTE, 0, 50, 1), *kernels, Kernel(COMPUTE, 150, 200, 21)


@pytest.mark.parametrize(
    ("transfer", "expected"),
    [
        ((60, 150), (0, 90, 10)),  # the last kernel was launched long before: it waited for this
        ((20, 40), (0, 0, 100)),  # under compute
        (None, (0, 0, 100)),
    ],
)
def test_a_device_waits_for_a_transfer(
    tmp_path: Path, transfer: tuple[int, int] | None, expected: tuple[int, int, int]
) -> None:
    kernels = device(*([] if transfer is None else [Kernel(PEER, *transfer, 11)]))
    assert idle(tmp_path, ranges=(FIRST, RECEIVE, LAST), kernels=kernels) == expected


def test_a_device_that_has_been_given_nothing_waits_for_the_host(tmp_path: Path) -> None:
    """A transfer is in flight, but what follows it is launched at 90."""
    late = Range("o1 dense.b[0] m0", 90, 95)
    kernels = (Kernel(COMPUTE, 0, 50, 1), Kernel(PEER, 50, 150, 11), Kernel(COMPUTE, 150, 200, 91))
    assert idle(tmp_path, ranges=(FIRST, RECEIVE, late), kernels=kernels) == (0, 59, 41)
    waits = Range("o1 wait receive.b[0] m0", 60, 89)  # unless the host waits for the transfer itself
    assert idle(tmp_path, ranges=(FIRST, RECEIVE, late, waits), kernels=kernels) == (0, 88, 12)


def test_an_exchange_comes_before_the_pipeline(tmp_path: Path) -> None:
    combine = Range("o1 combine.f[0] m1", 12, 14)
    kernels = device(Kernel(PEER, 50, 150, 11), Kernel(EXCHANGE, 100, 120, 13))
    assert idle(tmp_path, ranges=(FIRST, RECEIVE, combine, LAST), kernels=kernels) == (20, 80, 0)


def test_a_host_without_waits_has_transfers(tmp_path: Path) -> None:
    flight = Range("o1 flight receive.b[0] m0", 10, 18, 3)
    assert idle(tmp_path, ranges=(FIRST, RECEIVE, LAST, flight)) == (0, 8, 82)
    waits = Range("o1 wait receive.b[0] m0", 12, 18)
    assert idle(tmp_path, ranges=(FIRST, RECEIVE, LAST, flight, waits)) == (0, 6, 84)
