"""Phases, and what counts as open."""

from pathlib import Path

import pytest

from overlap1f1b.plan import Overlap, Resource
from overlap1f1b.profiling import Lanes, figures_of, read_file
from overlap1f1b.schedule import Kind
from tests.profiling.simulated import simulated, write_run
from tests.profiling.synthetic import COMPUTE, EXCHANGE, PEER, Events, Kernel, Range, recorded, timed, write_record
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
    """For the order, the pipeline and the host."""
    found = figures_of(recorded(folder, Events([STEP, *ranges], list(kernels)))).idle
    return found["order"], found["pipeline"], found["host"]


def device(*kernels: Kernel) -> tuple[Kernel, ...]:
    """From 0 to 200: compute at both ends."""
    return Kernel(COMPUTE, 0, 50, 1), *kernels, Kernel(COMPUTE, 150, 200, 21)


@pytest.mark.parametrize(
    ("transfer", "expected"),
    [
        ((60, 150), (0, 90, 10)),  # the last kernel was launched long before: it waited for this
        *wide(
            ((20, 40), (100, 0, 0)),  # under compute: nothing was missing, and the device ran something else
            (None, (100, 0, 0)),
        ),
    ],
)
def test_a_device_waits_for_a_transfer(
    tmp_path: Path, transfer: tuple[int, int] | None, expected: tuple[int, int, int]
) -> None:
    kernels = device(*([] if transfer is None else [Kernel(PEER, *transfer, 11)]))
    assert idle(tmp_path, ranges=(FIRST, RECEIVE, LAST), kernels=kernels) == expected


def test_a_device_that_has_been_given_nothing_waits_for_the_host(tmp_path: Path) -> None:
    late = Range("o1 dense.b[0] m0", 90, 95)
    kernels = (Kernel(COMPUTE, 0, 50, 1), Kernel(PEER, 50, 80, 11), Kernel(COMPUTE, 150, 200, 91))
    assert idle(tmp_path, ranges=(FIRST, RECEIVE, late), kernels=kernels) == (59, 30, 11)
    kernels = (Kernel(COMPUTE, 0, 50, 1), Kernel(PEER, 50, 150, 11), Kernel(COMPUTE, 150, 200, 91))
    assert idle(tmp_path, ranges=(FIRST, RECEIVE, late), kernels=kernels) == (0, 100, 0)  # late beside a transfer


def test_what_is_awaited_is_the_cause_beside_an_exchange_too(tmp_path: Path) -> None:
    combine = Range("o1 combine.f[0] m1", 12, 14)
    kernels = device(Kernel(PEER, 50, 150, 11), Kernel(EXCHANGE, 100, 120, 13))
    found = figures_of(recorded(tmp_path, Events([STEP, FIRST, RECEIVE, combine, LAST], list(kernels))))
    assert (found.idle["pipeline"], found.by_cause["pipeline"], found.overlap.exposed) == (100, 20, 20)


def test_an_exchange_of_several_kernels_is_awaited_as_a_whole(tmp_path: Path) -> None:
    ranges = timed("step 1: 0–100, attention.f[0] m0: 0–5, dispatch.f[0] m0: 5–9, experts.f[0] m0: 9–10")
    kernels = [Kernel(COMPUTE, 0, 20, 1), Kernel(EXCHANGE, 20, 40, 6), Kernel(EXCHANGE, 40, 60, 7, copy=True)]
    found = figures_of(recorded(tmp_path, Events(ranges, [*kernels, Kernel(COMPUTE, 60, 100, 9)])))
    assert found.by_cause == {"order": 40, "imbalance": 0, "host": 0, "link": 0, "pipeline": 0}


def test_a_host_without_waits_has_transfers(tmp_path: Path) -> None:
    flight = Range("o1 flight receive.b[0] m0", 10, 18, 3)
    assert idle(tmp_path, ranges=(FIRST, RECEIVE, LAST, flight)) == (0, 8, 82)
    waits = Range("o1 wait receive.b[0] m0", 12, 18)
    assert idle(tmp_path, ranges=(FIRST, RECEIVE, LAST, flight, waits)) == (0, 8, 82)
