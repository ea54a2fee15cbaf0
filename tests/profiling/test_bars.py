"""Bars of a step, and the arrows between them."""

from pathlib import Path

import pytest

from overlap1f1b.plan import Node, Op
from overlap1f1b.profiling import arrows, bars_of, figures_of, predict, predicted_bars, read
from overlap1f1b.profiling.figures import offsets
from tests.profiling.cases import device
from tests.profiling.simulated import simulated, write_run
from tests.profiling.synthetic import COMPUTE, EXCHANGE, Events, Kernel, Range, timed, write_chrome
from tests.tiers import wide

EXCHANGED = (Op.COUNTS, Op.DISPATCH, Op.COMBINE)


def test_every_exchange_has_its_consumer(tmp_path: Path) -> None:
    timeline = simulated("combined_1f1b", 3)
    bars = bars_of(read(write_run(tmp_path / "run", timeline)).ranks, 1)
    assert len(bars) == sum(span.end > span.start for rank in timeline.ranks for span in rank.spans)
    found = arrows(bars)
    travelled = [bar for bar in bars if isinstance(bar.what, Node) and bar.what.op in EXCHANGED]
    assert sorted(source for source, _ in found if source in travelled) == sorted(travelled)
    following = {
        (Op.COUNTS, "F"): Op.DISPATCH, (Op.DISPATCH, "F"): Op.EXPERTS, (Op.COMBINE, "F"): Op.AGGREGATE,
        (Op.COMBINE, "I"): Op.EXPERTS, (Op.DISPATCH, "I"): Op.ATTENTION,
    }  # fmt: skip
    for source, target in found:
        assert isinstance(source.what, Node)
        assert isinstance(target.what, Node)
        assert target.what.op is following[source.what.op, source.what.kind.value]
        assert source.what._replace(op=target.what.op, call=0, part=0) == target.what
        assert source.end <= target.start + 1e-6


def test_a_node_is_one_bar_and_streams_say_which(tmp_path: Path) -> None:
    (recording,) = read(write_chrome(tmp_path / "a.json", device())).ranks
    found = [(bar.lane, str(bar.what), round(1e6 * bar.start), round(1e6 * bar.end)) for bar in bars_of([recording], 4)]
    assert sorted(found) == [
        ("compute", "attention.b[0] m0", 799, 899),
        ("compute", "attention.f[0] m0", 99, 199),
        ("compute", "attention.f[0] m1", 219, 319),
        ("compute", "dispatch.f[0] m0", 199, 219),  # packs
        ("compute", "experts.f[0] m0", 439, 539),
        ("compute", "stream 7", 899, 919),
        ("exchange", "dispatch.f[0] m0", 219, 439),  # two kernels
        ("peers", "receive.b[0] m0", 599, 799),
        ("peers", "send.f[0] m0", 539, 599),
    ]


def test_kernels_without_ranges_are_drawn_together_where_gaps_cannot_be_seen(tmp_path: Path) -> None:
    kernels = [Kernel(COMPUTE, 10 * place, 10 * place + 9, 0) for place in range(1000)]
    kernels += [Kernel(EXCHANGE, 100, 200, 1), Kernel(EXCHANGE, 40_000, 40_100, 2)]
    recordings = read(write_chrome(tmp_path / "a.json", Events([], kernels))).ranks
    bars = [(bar.lane, round(1e6 * bar.start), round(1e6 * bar.end)) for bar in bars_of(recordings, 0)]
    assert bars == [("compute", 0, 9999), ("stream 20", 100, 200), ("stream 20", 40_000, 40_100)]


def test_predictions_stand_beside_and_have_arrows_of_their_own(tmp_path: Path) -> None:
    ranks = read(write_run(tmp_path / "run", simulated("1f1b", 3))).ranks
    measured, predicted = bars_of(ranks, 1), predicted_bars(ranks, predict(ranks, 1))
    assert {bar.process for bar in predicted} == {"rank 0 predicted", "rank 1 predicted"}
    assert len(measured) == len(predicted)
    both = arrows([*measured, *predicted])
    assert len(both) == len(arrows(measured)) + len(arrows(predicted))
    assert all(("predicted" in source.process) == ("predicted" in target.process) for source, target in both)
    assert all(isinstance(bar.what, Node) for bar in measured)


@pytest.mark.parametrize("skew", [0, *wide(7, -(10**13))])
def test_ranks_that_share_experts(tmp_path: Path, skew: int) -> None:
    write_chrome(tmp_path / "a.json", device(0))
    write_chrome(tmp_path / "b.json", device(1).shifted(skew))
    assert offsets([(recording, recording.steps[0]) for recording in read(tmp_path).ranks]) == [-1, -1 - skew]


def test_pipeline_ranks_meet_where_they_send(tmp_path: Path) -> None:
    """Records count from each rank's own start; what one sends and the other receives brings them together."""
    send = timed("step 1: 0–100, dense.f[0] m0: 0–30, flight send.f[0] m0: 30–50")
    receive = timed("step 1: 1000–1100, flight receive.f[0] m0 s1: 1000–1010, dense.f[0] m0 s1: 1010–1020")
    write_chrome(tmp_path / "a.json", Events([Range("o1 rank 0: pp 0/2", 0, 100), *send]))
    write_chrome(tmp_path / "b.json", Events([Range("o1 rank 1: pp 1/2", 1000, 1100), *receive]))
    ranks = read(tmp_path).ranks
    assert offsets([(recording, recording.steps[0]) for recording in ranks]) == [0, -960]
    bars = bars_of(ranks, 1)
    ends = {str(bar.what): round(bar.end * 1e6) for bar in bars}
    assert ends["send.f[0] m0"] == ends["receive.f[0] m0 s1"] == 50
    assert [(str(a.what), str(b.what)) for a, b in arrows(bars)] == [
        ("receive.f[0] m0 s1", "dense.f[0] m0 s1"),
        ("send.f[0] m0", "receive.f[0] m0 s1"),
    ]


def test_copies_lead_to_what_needs_them_and_open_no_action(tmp_path: Path) -> None:
    """What has left has no consumer; its microbatch's forward ended before it was freed."""
    forward = "attention.f[0] m0: 0–10, flight offload.f[0] m0: 10–30, flight dispatch.f[0] m0: 10–20"
    more = "experts.f[0] m0: 20–40, attention.f[0] m1: 45–50, free.f[0] m0: 55–56"
    copies = "flight fetch.b[0.1] m0: 56–60, flight fetch.b[0] m0: 60–70"
    backward = "experts.b[0] m0: 70–80, attention.b[0] m0: 80–90"
    write_chrome(tmp_path / "a.json", Events(timed(f"step 1: 0–100, {forward}, {more}, {copies}, {backward}")))
    (recording,) = read(tmp_path).ranks
    assert [(str(a.what), str(b.what)) for a, b in arrows(bars_of([recording], 1))] == [
        ("dispatch.f[0] m0", "experts.f[0] m0"),
        ("fetch.b[0.1] m0", "experts.b[0] m0"),
        ("fetch.b[0] m0", "attention.b[0] m0"),
    ]
    assert figures_of(recording).open_actions == 1


def test_ranks_with_nothing_in_common_begin_together(tmp_path: Path) -> None:
    for rank, ahead in enumerate((0, 12345)):
        label, node = f"o1 rank {rank}: dp {rank}/2, ep 0/1", "o1 dense.f[0] m0"
        ranges = [Range(label, 0, 99), Range("o1 step 1", 5, 99), Range(node, 10 * (1 + rank), 90)]
        write_chrome(tmp_path / f"{rank}.json", Events(ranges).shifted(ahead))
    assert offsets([(recording, recording.steps[0]) for recording in read(tmp_path).ranks]) == [-5, -12350]
