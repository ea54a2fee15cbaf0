"""Timelines of programs against a relaxation that knows no order of events, and known spans."""

import random
from typing import Any

import pytest

import overlap1f1b as o1
from overlap1f1b.schedule import SCHEDULES, Action, Kind, Pair, Program, build_schedule, parse_slot
from overlap1f1b.simulation import Costs, play_actions, simulate
from overlap1f1b.simulation.actions import SlotSpan, TransferSpan
from tests.counting import work
from tests.schedule.brute import F, W
from tests.schedule.test_program_mutations import a_program
from tests.tiers import first


def relaxed(program: Program, costs: Costs) -> dict[Action, float]:  # noqa: PLR0912  one place for the whole model
    """End of every action: raised again and again until nothing changes."""
    pipes = program.placement.pipes
    share = program.placement.ranks / len(pipes[0])
    length = {F: costs.forward, Kind.B: costs.backward, W: costs.weight, Kind.I: costs.backward - costs.weight}
    ends: dict[Action, float] = {}
    leaves: dict[tuple[int, int], list[Action]] = {}
    for rank, row in enumerate(program.ranks):
        for step in row:
            for action in (step.backward, step.forward) if isinstance(step, Pair) else (step,):
                onward = action.stage + (1 if action.kind is F else -1)
                if action.kind is not W and 0 <= onward < len(pipes[0]) and pipes[action.pipe][onward] != rank:
                    leaves.setdefault((rank, pipes[action.pipe][onward]), []).append(action)
    arrival: dict[Action, float] = {}
    changed = True
    while changed:
        changed = False
        for actions in leaves.values():
            before = 0.0
            for action in actions:
                before = max(before, ends.get(action, 0.0)) + costs.send
                arrival[action] = before
        for rank, row in enumerate(program.ranks):
            free = 0.0
            for step in row:
                members = tuple(step) if isinstance(step, Pair) else (step,)
                for kind, stage, microbatch, pipe in members:
                    source = stage - 1 if kind is F else stage + 1
                    if kind is W or not 0 <= source < len(pipes[0]):
                        continue
                    for made in (F,) if kind is F else (Kind.B, Kind.I):
                        action = Action(made, source, microbatch, pipe)
                        there = ends.get(action, 0.0) if pipes[pipe][source] == rank else arrival.get(action, 0.0)
                        free = max(free, there)
                scale = costs.pair if len(members) == 2 else 1.0
                free += scale * share * sum(length[action.kind] for action in members)
                for action in members:
                    if ends.get(action) != free:
                        ends[action] = free
                        changed = True
    return ends


def test_ends_agree_with_a_relaxation() -> None:
    rng = random.Random(0)
    for _ in range(150):
        program = a_program(rng)
        backward = rng.randint(2, 12) / 4
        forward, pair, send = rng.randint(1, 8) / 4, rng.choice([0.5, 1.0]), rng.choice([0, 0.25, 1, 4])
        costs = Costs(forward, backward, backward / 2, pair, send=send)
        timeline = simulate(program, costs)
        want = relaxed(program, costs)
        for rank, row in enumerate(program.ranks):
            spans = timeline.ranks[rank]
            assert [span.slot for span in spans] == list(row)
            for span in spans:
                for action in span.slot if isinstance(span.slot, Pair) else (span.slot,):
                    assert span.end == pytest.approx(want[action])
        assert timeline.makespan == pytest.approx(max(want.values()))


def test_spans_and_transfers() -> None:
    timeline = o1.simulate(o1.build_schedule("1f1b", ranks=2, microbatches=2), o1.Costs(send=0.5))
    assert isinstance(timeline, o1.ProgramTimeline)
    steps = ["1F0", "1B0", "1F1", "1B1"]
    times = [(1.5, 2.5), (2.5, 4.5), (4.5, 5.5), (5.5, 7.5)]
    assert timeline.ranks[1] == tuple(SlotSpan(parse_slot(s), *t) for s, t in zip(steps, times, strict=True))
    assert timeline.transfers[0] == TransferSpan(Action(F, 0, 0), 0, 1, 1.0, 1.5)
    assert (timeline.makespan, timeline.busy(1), timeline.bubble(1), timeline.bubble(0)) == (10.0, 6.0, 4.0, 4.0)


def test_transfers_of_a_lane_follow_each_other() -> None:
    timeline = simulate(build_schedule("afab", ranks=2, microbatches=3, forward_only=True), Costs(send=3))
    assert [(t.start, t.end) for t in timeline.transfers] == [(1.0, 4.0), (4.0, 7.0), (7.0, 10.0)]
    assert timeline.makespan == 11.0
    assert [timeline.peak_activations(rank) for rank in (0, 1)] == [1.0, 1.0]


@pytest.mark.parametrize("name", first(SCHEDULES, "combined_1f1b", "dualpipe"))
def test_work_of_generating_checking_and_playing_grows_linearly(name: str) -> None:
    chunks = 2 if name in ("sequential", "afab", "interleaved_1f1b", "combined_1f1b", "zb_h1") else None

    def of_each_action(ranks: int, microbatches: int) -> list[float]:
        program = build_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
        count = sum(1 for rank in range(ranks) for _ in program.actions(rank))
        parts = (
            lambda: build_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks),
            program.check,
            lambda: play_actions(program, Costs(send=0.5)),
        )
        return [work(part) / count for part in parts]

    few = of_each_action(4, 16)
    for sizes in ((4, 64), (12, 64)):
        for more, less in zip(of_each_action(*sizes), few, strict=True):
            assert less / 2 < more < 1.1 * less, sizes


def test_costs_of_steps() -> None:
    costs = Costs(forward=2, backward=6, weight=4, pair=0.5)
    want = {"0F0": 2, "0B0": 6, "0I0": 2, "0W0": 4, "(0F1;0B0)OVERLAP_F_B": 4, "(0F1;0I0)OVERLAP_F_B": 2}
    assert {text: costs.of(parse_slot(text)) for text in want} == want
    assert {text: costs.of(parse_slot(text), 0.5) for text in want} == {text: cost / 2 for text, cost in want.items()}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"forward": 0}, "forward=0; allowed: a finite number, more than 0"),
        ({"pair": -1.0}, "pair=-1.0; allowed: a finite number, more than 0"),
        ({"forward": float("nan")}, "forward=nan; allowed: a finite number, more than 0"),
        ({"weight": -0.5}, "weight=-0.5; allowed: a finite number, 0 or more"),
        ({"weight": 2, "backward": 2}, "weight=2 with backward=2, which it is a part of; allowed: from 0 to below 2"),
        ({"forward": "1"}, "forward='1'; allowed: a finite number, more than 0"),
        ({"send": None}, "send=None; allowed: a finite number, 0 or more"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        Costs(**options)
