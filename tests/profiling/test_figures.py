"""Phases, and what counts as open."""

from pathlib import Path

import pytest

from overlap1f1b.plan import Overlap, Resource
from overlap1f1b.profiling import Lanes, figures_of, read_file
from overlap1f1b.schedule import Kind
from tests.profiling.simulated import simulated, write_run
from tests.profiling.synthetic import COMPUTE, EXCHANGE, PEER, Events, Kernel, Range, recorded, write_record
from tests.tiers import wide


@pytest.mark.parametrize(("schedule", "overlap"), [("1f1b", "serial"), *wide(("combined_1f1b", 3), ("afab", "serial"))])
def test_phases_end_with_the_first_backward_and_the_last_forward(
    tmp_path: Path, schedule: str, overlap: Overlap
) -> None:
    timeline = simulated(schedule, overlap, microbatches=6)
    folder = write_run(tmp_path / "run", timeline)
    for number, rank in enumerate(timeline.ranks):
        (recording,) = read_file(folder / f"rank{number}.json")
        (step,) = recording.steps
        phases = {name: [time / 1e6 for time in edges] for name, edges in Lanes(recording, step).phases.items()}
        spans = [span for span in rank.spans if span.node.resource is Resource.COMPUTE]
        first = min(span.start for span in spans if span.node.kind is not Kind.F)
        last = max(first, *(span.end for span in spans if span.node.kind is Kind.F))
        assert phases["warm_up"] == pytest.approx([0, first])
        assert phases["steady"] == pytest.approx([first, last])
        assert phases["cool_down"] == pytest.approx([last, timeline.makespan])


def test_what_is_computed_again_begins_no_phase(tmp_path: Path) -> None:
    spans = [
        ("node", "dense.f[0] m0", 0.0, 1.0),
        ("node", "recompute_dense.b[0] m0", 1.0, 2.0),
        ("node", "dense.f[0] m1", 2.0, 3.0),
        ("node", "dense.b[0] m0", 4.0, 5.0),
    ]
    (recording,) = read_file(write_record(tmp_path / "rank0.json", [spans]))
    lanes = Lanes(recording, recording.steps[0])
    assert lanes.phases["warm_up"] == (0, 4 * 10**9)
    assert lanes.open_actions == 1


def test_forwards_alone_are_steady(tmp_path: Path) -> None:
    (recording,) = read_file(write_record(tmp_path / "rank0.json", [[("node", "dense.f[0] m0", 0.0, 1.0)]]))
    lanes = Lanes(recording, recording.steps[0])
    assert lanes.phases == {"warm_up": (0, 0), "steady": (0, 10**9), "cool_down": (10**9, 10**9)}


STEP = Range("o1 step 1", 0, 100)
FIRST, LAST = Range("o1 dense.f[0] m0", 0, 5), Range("o1 dense.b[0] m0", 20, 25)
RECEIVE = Range("o1 receive.b[0] m0", 10, 12)


def idle(folder: Path, *, ranges: tuple[Range, ...], kernels: tuple[Kernel, ...] = ()) -> tuple[int, int, int]:
    """For exchange, pipeline and host."""
    first, second, third = figures_of(recorded(folder, Events([STEP, *ranges], list(kernels)))).idle.values()
    return first, second, third


def device(*kernels: Kernel) -> tuple[Kernel, ...]:
    """From 0 to 200: compute at both ends."""
    return Kernel(COMPUTE, 0, 50, 1), *kernels, Kernel(COMPUTE, 150, 200, 21)


@pytest.mark.parametrize(
    ("transfer", "expected"),
    [
        ((60, 150), (0, 90, 10)),  # the last kernel was launched long before: it waited for this
        *wide(
            ((20, 40), (0, 0, 100)),  # under compute
            (None, (0, 0, 100)),
        ),
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
