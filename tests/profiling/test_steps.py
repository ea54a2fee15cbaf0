"""Steps with known answers, of every kind of file: the same figures to the nanosecond."""

from math import isnan
from pathlib import Path

import pytest

from overlap1f1b.plan import Label, Node
from overlap1f1b.profiling import Lanes, Recording, figures_of, read_file
from overlap1f1b.profiling.figures import longest
from tests.profiling.cases import DEVICE, DEVICE_IDLE, HOST, HOST_IDLE, OTHER, device, host, summed
from tests.profiling.synthetic import (
    COMPUTE,
    EXCHANGE,
    LANE,
    PEER,
    Events,
    Kernel,
    Range,
    recorded,
    timed,
    write_chrome,
    write_nsys,
)
from tests.tiers import first, wide

KINDS = ("chrome", "gzip", "nsys")


def written(path: Path, events: Events, kind: str) -> Recording:
    files = {
        "chrome": lambda: write_chrome(path / "trace.json", events),
        "gzip": lambda: write_chrome(path / "trace.json.gz", events),
        "nsys": lambda: write_nsys(path / "trace.sqlite", {7: events}),
    }
    (found,) = read_file(files[kind]())
    return found


def issued(recording: Recording) -> list[str]:
    """What computed, in order."""
    (step,) = recording.steps
    return [str(recording.names[what]) for what in step.compute.what]


def waits(recording: Recording, count: int) -> list[tuple[float, float, str, str]]:
    """The longest ones: when, how long, for what, and ahead of what."""
    spans = longest([recording], count=count)
    return [(span.start_ms * 1e6, span.exposed_ms * 1e6, span.waited_for, span.next) for span in spans]


@pytest.mark.parametrize("kind", first(KINDS, "chrome"))
def test_a_device(tmp_path: Path, kind: str) -> None:
    recording = written(tmp_path, device(), kind)
    figures = figures_of(recording)
    assert summed(recording) == DEVICE
    assert figures.idle == DEVICE_IDLE
    assert figures.by_sub_op == {"dispatch.f": (220, 120)}
    assert figures.by_phase == {"warm_up": (220, 120), "steady": (0, 0), "cool_down": (0, 0)}
    assert figures.open_actions == 2
    assert (recording.rank, recording.world, recording.device, recording.by) == (0, 2, True, "range")
    assert recording.notes == (
        f"kernels launched outside all ranges on streams {OTHER} count neither as compute nor as exchange",
    )
    assert [step.number for step in recording.steps] == [4]
    assert issued(recording) == [
        "attention.f[0] m0", "dispatch.f[0] m0", "attention.f[0] m1", "experts.f[0] m0", "attention.b[0] m0",
        f"stream {COMPUTE}",
    ]  # fmt: skip
    assert waits(recording, 9) == [(319, 120, "dispatch.f[0] m0", "experts.f[0] m0")]


@pytest.mark.parametrize("kind", first(KINDS, "chrome"))
def test_a_host(tmp_path: Path, kind: str) -> None:
    recording = written(tmp_path, host(), kind)
    figures = figures_of(recording)
    assert summed(recording) == HOST
    assert figures.idle == HOST_IDLE
    assert figures.by_sub_op == {"counts.f": (15, 7), "dispatch.f": (20, 7), "reduce.w": (30, 20)}
    assert figures.by_phase == {"warm_up": (45, 32), "steady": (0, 0), "cool_down": (10, 0)}
    assert (recording.rank, recording.world, recording.device) == (1, 2, False)
    assert waits(recording, 2) == [
        (60, 20, "reduce.w[0] m0 s1", "experts.w[0] m0 s1"),
        (38, 7, "dispatch.f[0] m0 s1", "experts.f[0] m0 s1"),
    ]
    assert longest([recording], count=2)[1].in_flight == ("counts.f[0] m0 s1", "dispatch.f[0] m0 s1")


@pytest.mark.parametrize("kind", first(KINDS, "chrome"))
def test_streams_where_ranges_are_missing(tmp_path: Path, kind: str) -> None:
    bare = Events([], [kernel for kernel in device().kernels if kernel.stream != OTHER])
    recording = written(tmp_path, bare, kind)
    figures = figures_of(recording)
    assert recording.by == "stream"
    assert "no ranges of overlap1f1b" in recording.notes[0]
    assert f"stream {COMPUTE}" in recording.notes[0]
    assert figures.by_sub_op == {f"stream {EXCHANGE}": (220, 120), f"stream {PEER}": (260, 260)}
    assert figures.overlap == (480, 380)
    assert figures.by_phase == {}


@pytest.mark.parametrize("kind", ["chrome", *wide("nsys")])
def test_streams_where_launches_are_missing(tmp_path: Path, kind: str) -> None:
    """Ranges alone say nothing of kernels: not that nothing was exchanged."""
    kernels = [kernel._replace(launched=None) for kernel in device().kernels if kernel.stream != OTHER]
    recording = written(tmp_path, Events(device().ranges, kernels), kind)
    assert (recording.rank, recording.by) == (0, "stream")
    assert figures_of(recording).overlap == (480, 380)
    assert recording.notes == (
        "11 of 11 kernels have no launch in the file, so no range",
        f"no kernel was launched in a range of overlap1f1b: stream {COMPUTE}, which has most kernels, counts as "
        "compute and all others as exchange",
        "no launches: the whole file is taken for one step",
    )


SENDRECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
GEMM = "void cutlass::Kernel2<cutlass_80_tensorop_bf16>(Params)"


@pytest.mark.parametrize("kind", first(KINDS, "chrome"))
@pytest.mark.parametrize("ranges", ["none", "of others"])
def test_names_where_ranges_are_missing(tmp_path: Path, kind: str, ranges: str) -> None:
    """An exchange on the compute stream, copies and kernels on side streams, more exchanges than compute."""
    kernels = [
        Kernel(COMPUTE, 0, 100, 0, name=GEMM),
        Kernel(COMPUTE, 100, 200, 1, name=SENDRECV),
        Kernel(EXCHANGE, 210, 230, 2, name=SENDRECV),
        Kernel(EXCHANGE, 240, 300, 3, name="ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"),
        Kernel(OTHER, 150, 190, 4, name="my_own_kernel"),  # beside an exchange
        Kernel(OTHER, 300, 400, 5, copy=True, name="Memcpy DtoH (Device -> Pinned)"),
        Kernel(PEER, 250, 290, 6, copy=True, name="Memcpy DtoD (Device -> Device)"),
    ]
    others = [] if ranges == "none" else [Range("forward", 0, 9), Range("nccl:all_to_all", 1, 3)]
    recording = written(tmp_path, Events(others, kernels), kind)
    figures = figures_of(recording)
    assert (recording.by, recording.measured) == ("name", True)
    assert (figures.compute, figures.overlap) == (140, (180, 140))
    assert figures.by_sub_op == {"ncclDevKernel_AllGather_RING_LL": (60, 60), "ncclDevKernel_SendRecv": (120, 80)}
    copies = "Memcpy" if kind == "nsys" else "Memcpy DtoH, Memcpy DtoD"
    assert recording.notes == (
        "no ranges of overlap1f1b: names of kernels tell what they do",
        "exchange: 3 of 7 kernels and copies, 0.000 ms: ncclDevKernel_SendRecv, ncclDevKernel_AllGather_RING_LL",
        "compute: 2 of 7 kernels and copies, 0.000 ms: cutlass::Kernel2, my_own_kernel",
        f"left out: 2 of 7 kernels and copies, 0.000 ms: {copies}",
        "no ranges of steps: the whole file is taken for one step",
    )


def test_no_known_name_of_an_exchange_is_not_measured(tmp_path: Path) -> None:
    """Kernels that are known to compute do so on any stream; copies beside them are no exchange."""
    kernels = [
        Kernel(COMPUTE, 0, 100, 0, name=GEMM),
        Kernel(OTHER, 50, 150, 1, name="void at::native::elementwise_kernel<128>(int)"),
        Kernel(PEER, 150, 250, 2, copy=True, name="Memcpy HtoD (Pinned -> Device)"),
    ]
    recording = recorded(tmp_path, Events([], kernels))
    figures = figures_of(recording)
    assert (recording.by, recording.measured, figures.measured) == ("name", False, False)
    assert (figures.compute, figures.overlap) == (150, (0, 0))
    assert recording.notes[1] == "exchange: 0 of 3 kernels and copies, 0.000 ms: no name is known for it"
    unknown = recorded(tmp_path, Events([], [*kernels, Kernel(EXCHANGE, 100, 140, 3, name="my_exchange")]))
    assert (unknown.by, figures_of(unknown).overlap) == ("stream", (40, 0))


@pytest.mark.parametrize("flights", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_exchanges_that_were_issued_and_not_seen_are_not_measured(tmp_path: Path, ranks: int, flights: bool) -> None:
    """As where the profiler has no access to the device; a rank alone exchanges nothing."""
    ranges = [Range(str(Label(0, {"ep": (0, ranks)})), 0, 200)]
    ranges += timed("step 1: 0–100, attention.f[0] m0: 0–10, dispatch.f[0] m0: 10–20")
    ranges += timed("flight dispatch.f[0] m0: 12–30", LANE) if flights else []
    assert figures_of(recorded(tmp_path, Events(ranges))).measured == (flights or ranks == 1)


@pytest.mark.parametrize("kind", ["chrome", *wide("nsys")])
def test_what_ends_before_it_starts_takes_no_time(tmp_path: Path, kind: str) -> None:
    kernels = [kernel._replace(end=kernel.start - 5) for kernel in device().kernels]
    figures = figures_of(written(tmp_path, Events(device().ranges, kernels), kind))
    assert (figures.compute, figures.overlap) == (0, (0, 0))
    assert figures.time == sum(figures.idle.values()) > 0


def test_an_exchange_on_the_stream_that_computes(tmp_path: Path) -> None:
    ranges = timed("attention.f[0] m0: 0–10, dispatch.f[0] m0: 10–20")
    kernels = [Kernel(COMPUTE, 20, 30, 1), Kernel(COMPUTE, 30, 50, 11), Kernel(COMPUTE, 60, 70, 2)]
    recording = recorded(tmp_path, Events(ranges, kernels))
    assert figures_of(recording).overlap == (20, 20)
    assert recording.notes[0] == "no ranges of steps: the whole file is taken for one step"


def test_streams_side_by_side_and_a_later_step(tmp_path: Path) -> None:
    ranges = timed("step 1: 0–50, attention.f[0] m0: 0–10, dispatch.f[0] m0: 10–20, combine.b[0] m1: 20–30")
    ranges += timed("step 2: 50–100, attention.f[0] m0: 50–60")
    kernels = [
        Kernel(COMPUTE, 10, 30, 1),
        Kernel(EXCHANGE, 20, 60, 11),
        Kernel(EXCHANGE + 1, 40, 80, 21),
        Kernel(COMPUTE, 300, 310, 51),
        Kernel(COMPUTE, 320, 330, None),  # nobody knows who launched it
    ]
    recording = recorded(tmp_path, Events(ranges, kernels))
    figures = [Lanes(recording, step).figures for step in recording.steps]
    assert figures[0].overlap == (60, 50)
    assert figures[0].by_sub_op == {"combine.b": (40, 40), "dispatch.f": (40, 30)}
    assert figures[1].overlap == (0, 0)
    assert isnan(figures[1].overlap.hidden_fraction)
    assert figures[1].time == 310 - 80
    assert recording.notes == ("1 of 5 kernels have no launch in the file, so no range",)
    assert figures_of(recording).overlap == (60, 50)


def test_nodes_nest_and_kernels_belong_to_the_innermost(tmp_path: Path) -> None:
    ranges = timed("experts.f[0] m0: 0–100, wait dispatch.f[0] m0: 10–20, combine.f[0] m0: 100–110")
    times = {5: 200, 15: 210, 25: 220, 99: 230, 100: 240}
    kernels = [Kernel(EXCHANGE if at in (15, 100) else COMPUTE, start, start + 10, at) for at, start in times.items()]
    recording = recorded(tmp_path, Events(ranges, kernels))
    (step,), names = recording.steps, recording.names
    assert issued(recording) == ["experts.f[0] m0"] * 3
    assert [str(names[what]) for what in step.flights.what] == ["dispatch.f[0] m0", "combine.f[0] m0"]
    assert all(isinstance(what, Node) for what in names)


def test_flights_on_the_issuing_thread_lie_across_nodes(tmp_path: Path) -> None:
    ranges = timed("dispatch.f[0] m0: 0–10, attention.f[0] m1: 10–20, experts.f[0] m0: 30–40")
    ranges += timed("flight dispatch.f[0] m0: 5–90")  # its host's view; its kernel says better
    kernels = [
        Kernel(EXCHANGE, 10, 50, 6),
        Kernel(COMPUTE, 20, 30, 11),
        Kernel(COMPUTE, 30, 40, 25),
        Kernel(COMPUTE, 60, 70, 31),
    ]
    recording = recorded(tmp_path, Events(ranges, kernels))
    assert figures_of(recording).by_sub_op == {"dispatch.f": (40, 20)}
    assert issued(recording) == ["attention.f[0] m1", f"stream {COMPUTE}", "experts.f[0] m0"]


def test_ranges_of_two_ranks_in_a_trace_of_one(tmp_path: Path) -> None:
    events = Events([*device(0).ranges, *device(1).ranges])
    with pytest.raises(ValueError, match=r"trace\.json has ranges of ranks 0, 1; allowed: one file a rank"):
        recorded(tmp_path, events)


def test_neither_ranges_nor_kernels(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no ranges of overlap1f1b and no kernels"):
        recorded(tmp_path, Events([Range("aten::mm", 0, 10)]))
