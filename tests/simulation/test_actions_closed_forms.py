"""Makespans, bubbles and memory of every schedule against formulas.

P ranks, v chunks a rank, M microbatches; F, B, W costs of a rank's whole share, B = I + W. Bubble: makespan minus work.
Where a formula holds only for some costs, the condition stands at its test.
"""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap1f1b.schedule import Pair, Program, build_schedule
from overlap1f1b.simulation import Costs, ProgramTimeline, simulate

ranks = st.integers(1, 8)
microbatches = st.integers(1, 30)
chunks = st.integers(1, 4)
lengths = st.integers(1, 12).map(lambda n: n / 4)  # quarters, so that sums are exact
pairs = st.sampled_from([0.5, 0.7, 0.75, 0.85, 1.0])
few = settings(deadline=None, max_examples=20)


def costs(F: float, input_: float, W: float, pair: float = 1.0) -> Costs:
    return Costs(forward=F, backward=input_ + W, weight=W, pair=pair)


specs = st.builds(costs, lengths, lengths, lengths, st.just(1.0))


def check_work(timeline: ProgramTimeline, costs: Costs) -> None:
    """Every rank works M(F+B), less what its pairs save."""
    program = timeline.program
    for rank in range(len(program.ranks)):
        saved = pairs_of(program, rank) * (1 - costs.pair) * program.placement.share
        want = program.microbatches - saved
        assert timeline.busy(rank) == pytest.approx(want * (costs.forward + costs.backward))


def pairs_of(program: Program, rank: int) -> int:
    return sum(isinstance(step, Pair) for step in program.ranks[rank])


@given(st.sampled_from(["afab", "1f1b", "interleaved_1f1b", "combined_1f1b"]), ranks, microbatches, chunks, specs)
@few
def test_bubble_of_schedules_with_whole_backwards(name: str, P: int, M: int, v: int, spec: Costs) -> None:
    """(P−1)(F+B)/v at any costs: 1f1b with any M, the others with M ≥ P or one chunk."""
    v = 1 if name == "1f1b" else v
    M = M if v == 1 else max(M, P)
    timeline = simulate(build_schedule(name, ranks=P, microbatches=M, chunks=v, extra_warmup=None), spec)
    assert timeline.makespan == pytest.approx((M + (P - 1) / v) * (spec.forward + spec.backward))
    check_work(timeline, spec)


@given(ranks, st.integers(1, 16), chunks, specs)
@few
def test_sequential_uses_one_rank_at_a_time(P: int, M: int, v: int, spec: Costs) -> None:
    timeline = simulate(build_schedule("sequential", ranks=P, microbatches=M, chunks=v), spec)
    assert timeline.makespan == pytest.approx(P * M * (spec.forward + spec.backward))
    assert {timeline.peak_activations(rank) for rank in range(P)} == {1.0}


@given(microbatches, pairs, specs)
@few
def test_step_of_combined_on_one_rank(M: int, pair: float, spec: Costs) -> None:
    """F + (M−1)·F&B + B, at most 2 alive."""
    spec = replace(spec, pair=pair)
    timeline = simulate(build_schedule("combined_1f1b", microbatches=M, extra_warmup=0), spec)
    both = spec.forward + spec.backward
    assert timeline.makespan == pytest.approx(both + (M - 1) * pair * both)
    assert timeline.peak_activations(0) == min(2, M)


@given(ranks, microbatches, chunks, st.data())
@few
def test_bubble_of_zb_h1(P: int, M: int, v: int, data: st.DataObject) -> None:
    """(P−1)(F+B−2W)/v where W ≤ F and W ≤ I, and M ≥ P."""
    W = data.draw(lengths)
    spec = costs(W + data.draw(st.sampled_from([0, 0.25, 1, 3])), W + data.draw(st.sampled_from([0, 0.25, 1, 3])), W)
    timeline = simulate(build_schedule("zb_h1", ranks=P, microbatches=max(M, P), chunks=v), spec)
    assert timeline.bubble(0) == pytest.approx((P - 1) * (spec.forward + spec.backward - 2 * W) / v)
    check_work(timeline, spec)


@pytest.mark.parametrize(("name", "share"), [("zb_h2", 1.0), ("zb_v", 0.5)])
@given(ranks, microbatches, lengths)
@few
def test_no_rank_waits_in_zb_h2_and_zb_v(name: str, share: float, P: int, M: int, unit: float) -> None:
    """F = I = W and M ≥ 2P−1: no gap on any rank, and the makespan is longer than the work by (P−1)F, half in a V."""
    spec = costs(unit, unit, unit)
    timeline = simulate(build_schedule(name, ranks=P, microbatches=max(M, 2 * P - 1)), spec)
    for rank, spans in enumerate(timeline.ranks):
        assert spans[-1].end - spans[0].start == pytest.approx(timeline.busy(rank))
    assert timeline.bubble(0) == pytest.approx((P - 1) * unit * share)
    check_work(timeline, spec)


@given(st.integers(1, 6), st.integers(0, 16), st.data())
@few
def test_bubble_of_dualpipe(half: int, more: int, data: st.DataObject) -> None:
    """(P/2−1)(F&B + B − 3W) where W ≤ F = I and B ≤ F&B: on every rank if a pair saves nothing, F&B = F + B.

    If it does, on the two middle ranks and their neighbours. A rank with h = min(r, P−1−r) below P/2−2 has that many
    pairs fewer than these, so it works longer by what they would have saved, and waits for less.
    """
    P = 2 * half
    spec, fused = folded_costs(data)
    timeline = simulate(build_schedule("dualpipe", ranks=P, microbatches=2 * P + 2 * more), spec)
    saving = spec.forward + spec.backward - fused
    for rank in range(P):
        fewer = max(0, half - 2 - min(rank, P - 1 - rank))
        want = (half - 1) * (fused + spec.backward - 3 * spec.weight) - fewer * saving
        assert timeline.bubble(rank) == pytest.approx(want)
    check_work(timeline, spec)


@given(ranks, st.integers(0, 16), st.data())
@few
def test_bubble_of_dualpipev(P: int, more: int, data: st.DataObject) -> None:
    """(P−1)(F&B + B − 3W) in costs of a chunk, likewise: if a pair saves time, on the last two ranks."""
    spec, fused = folded_costs(data)
    timeline = simulate(build_schedule("dualpipev", ranks=P, microbatches=2 * P + more), spec)
    saving = spec.forward + spec.backward - fused
    for rank in range(P):
        want = (P - 1) * (fused + spec.backward - 3 * spec.weight) - max(0, P - 2 - rank) * saving
        assert timeline.bubble(rank) == pytest.approx(want / 2)
    check_work(timeline, spec)


@pytest.mark.parametrize(
    ("F", "input_", "W", "pair", "bubbles"),
    [
        (1, 2, 1, 1.0, [11.0] * 8),  # I > F: the formula says 12
        (2, 1, 1, 1.0, [12.0] * 8),  # I < F: 9
        (1, 1, 1.5, 1.0, [6.0] * 8),  # W > F: 4.5
        (1, 1, 1, 0.6, [1.2, 2.4, 3.6, 3.6, 3.6, 3.6, 2.4, 1.2]),  # B > F&B: 0, 1.2, 2.4, …
    ],
)
def test_where_the_formula_of_dualpipe_does_not_hold(
    F: float, input_: float, W: float, pair: float, bubbles: list[float]
) -> None:
    timeline = simulate(build_schedule("dualpipe", ranks=8, microbatches=20), costs(F, input_, W, pair))
    assert [timeline.bubble(rank) for rank in range(8)] == pytest.approx(bubbles)


def folded_costs(data: st.DataObject) -> tuple[Costs, float]:
    F = data.draw(lengths)
    W = F * data.draw(st.sampled_from([0.25, 0.5, 1.0]))
    pair = data.draw(st.sampled_from([0.7, 0.75, 0.85, 1.0]))
    spec = costs(F, F, W, pair)
    return spec, pair * (spec.forward + spec.backward)


@pytest.mark.parametrize(
    ("pair", "makespans"),
    [
        (1.0, (117, 103, 99.5, 106.5, 101.25, 102, 103)),
        (0.85, (117, 103, 99.5, 94.125, 89.6625, 90.3, 90.85)),
        (0.7, (117, 103, 99.5, 81.75, 78.075, 78.6, 78.7)),
    ],
)
def test_table_of_makespans(pair: float, makespans: tuple[float, ...]) -> None:
    """P = 8, M = 32, F = 1, B = 2, W = 1."""
    cases = [("1f1b", 1), ("zb_h1", 1), ("zb_v", 2), ("combined_1f1b", 2), ("combined_1f1b", 4)]
    cases += [("dualpipe", 1), ("dualpipev", 2)]
    for (name, v), want in zip(cases, makespans, strict=True):
        program = build_schedule(name, ranks=8, microbatches=32, chunks=v)
        assert simulate(program, costs(1, 1, 1, pair)).makespan == pytest.approx(want, rel=0, abs=1e-9), (name, v)


def test_pairs_need_two_slots_a_hop() -> None:
    """With 2(P−r−1)+1 warm-up forwards 57 units, with P−r of them 99, at P = 4, M = 16."""
    assert simulate(build_schedule("combined_1f1b", ranks=4, microbatches=16), Costs()).makespan == 57
    assert simulate(stalling(4, 16), Costs()).makespan == 99


def stalling(P: int, M: int) -> Program:
    """Pairs after P−r forwards."""
    rows = []
    for rank in range(P):
        plain = build_schedule("combined_1f1b", microbatches=M, extra_warmup=P - rank - 1).ranks[0]
        rows.append(
            tuple(
                Pair(*(action._replace(stage=rank) for action in step))
                if isinstance(step, Pair)
                else step._replace(stage=rank)
                for step in plain
            )
        )
    whole = build_schedule("combined_1f1b", ranks=P, microbatches=M)
    return Program("stalling", M, tuple(rows), whole.peak_activations, whole.placement)


@given(ranks, microbatches, chunks, st.data())
@few
def test_peaks_of_loops(P: int, M: int, v: int, data: st.DataObject) -> None:
    G = data.draw(st.integers(min(P, M), M).filter(lambda size: M % size == 0 or M % size >= P))
    extra = data.draw(st.integers(0, 3))
    total = v * M

    def peaks(name: str, **options: int) -> list[float]:
        program = build_schedule(name, ranks=P, microbatches=M, **options)  # type: ignore[arg-type]
        timeline = simulate(program, Costs())
        assert [timeline.peak_activations(r) for r in range(P)] == [p / v for p in program.peak_activations]
        return [round(timeline.peak_activations(r) * v, 9) for r in range(P)]

    def most(r: int, more: int) -> int:
        return min(2 * (P - r - 1) + (v - 1) * G + 1 + more, total)

    options = {"chunks": v, "group_size": G, "extra_warmup": extra}
    assert peaks("interleaved_1f1b", **options) == [most(r, extra) for r in range(P)]
    assert peaks("combined_1f1b", **options) == [most(r, extra + 1) for r in range(P)]
    assert peaks("afab", chunks=v) == [total] * P
    assert peaks("zb_h1", chunks=v, group_size=G) == [min(P + (v - 1) * G, total)] * P
    if v == 1:
        assert peaks("1f1b", extra_warmup=extra) == [min(P - r + extra, M) for r in range(P)]
        assert peaks("zb_h2") == [min(2 * P - 1, M)] * P


@given(ranks, st.integers(0, 16))
@few
def test_peaks_of_folded_schedules(P: int, more: int) -> None:
    M = 2 * P + more
    for name, want in (("zb_v", float(P)), ("dualpipev", P + 0.5)):
        timeline = simulate(build_schedule(name, ranks=P, microbatches=M), Costs())
        assert [timeline.peak_activations(rank) for rank in range(P)] == [want] * P, name
    P += P % 2
    M = 2 * P + more + more % 2
    timeline = simulate(build_schedule("dualpipe", ranks=P, microbatches=M), Costs())
    assert [timeline.peak_activations(rank) for rank in range(P)] == [P + 1] * P


@given(ranks, microbatches, chunks)
@few
def test_peaks_of_few_microbatches(P: int, M: int, v: int) -> None:
    program = build_schedule("zb_h1", ranks=P, microbatches=M, chunks=v)
    chunked = simulate(program, Costs())
    first = -(-M // (M // P or 1))  # of groups as equal as can be
    want = min(P + (v - 1) * first, v * M) / v
    assert [chunked.peak_activations(rank) for rank in range(P)] == [want] * P, program
    folded = simulate(build_schedule("zb_v", ranks=P, microbatches=M), Costs())
    assert all(folded.peak_activations(rank) <= P for rank in range(P))


@given(ranks, microbatches, chunks)
@few
def test_fused_pairs_a_rank(P: int, M: int, v: int) -> None:
    rank_range = range(P)
    whole = P * (M // P or 1)  # so that groups are of P
    combined = build_schedule("combined_1f1b", ranks=P, microbatches=whole, chunks=v, extra_warmup=0)
    want = [max(0, v * whole - 2 * (P - r - 1) - (v - 1) * P - 1) for r in rank_range]
    assert [pairs_of(combined, r) for r in rank_range] == want
    folded = build_schedule("dualpipev", ranks=P, microbatches=2 * P + M)
    want = [2 * (2 * P + M) - 3 * P + r + 1 - (r == P - 1) for r in rank_range]
    assert [pairs_of(folded, r) for r in rank_range] == want
    P += P % 2
    M = 2 * P + M + M % 2
    both = build_schedule("dualpipe", ranks=P, microbatches=M)
    want = [M - 3 * P // 2 + min(r, P - 1 - r) + 1 - (r in (P // 2 - 1, P // 2)) for r in range(P)]
    assert [pairs_of(both, r) for r in range(P)] == want
