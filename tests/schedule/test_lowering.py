"""What stands beside the actions."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from overlap1f1b.schedule import SCHEDULES, Command, LoweredProgram, Verb, build_schedule, lower
from tests.counting import work


def texts(lowered: LoweredProgram) -> list[str]:
    return [" ".join(map(str, row)) for row in lowered.ranks]


def test_two_ranks() -> None:
    assert texts(lower(build_schedule("1f1b", ranks=2, microbatches=2))) == [
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0FREE0 0B1 0FREE1 0REDUCE_GRAD",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1FREE0 1F1 1B1 1SEND_B1 1FREE1 1REDUCE_GRAD",
    ]


def test_the_last_rank_of_a_v_passes_to_itself() -> None:
    row = lower(build_schedule("zb_v", ranks=2, microbatches=1)).ranks[1]
    assert [str(entry) for entry in row if isinstance(entry, Command) and entry.verb is Verb.LOCAL_PASS] == [
        "1LOCAL_PASS_F0",
        "2LOCAL_PASS_B0",
    ]


def test_a_lane_of_several_chunks_carries_activations_and_gradients() -> None:
    lowered = lower(build_schedule("interleaved_1f1b", ranks=2, microbatches=2, chunks=2))
    sends = [entry for entry in lowered.ranks[0] if isinstance(entry, Command) and entry.verb is Verb.SEND]
    assert [str(send) for send in sends] == ["0SEND_F0", "0SEND_F1", "2SEND_F0", "2SEND_F1", "2SEND_B0", "2SEND_B1"]
    assert [send.number for send in sends] == list(range(6))
    assert {send.peer for send in sends} == {1}


def test_replicas_are_summed_in_one_order() -> None:
    lowered = lower(build_schedule("dualpipe", ranks=4, microbatches=8))
    orders = [
        [entry.stage for entry in row if isinstance(entry, Command) and entry.verb is Verb.REDUCE_REPLICA]
        for row in lowered.ranks
    ]
    assert orders[0] == orders[3]
    assert orders[1] == orders[2]
    assert sorted(orders[0]) == [0, 3]


@pytest.mark.parametrize("ahead", [0, 1, 4, 1000])
@pytest.mark.parametrize("name", SCHEDULES)
def test_lowered_schedules_pass_their_checks(name: str, ahead: int) -> None:
    sizes = ((1, 3, None), (2, 4, None), (4, 8, None), (4, 13, None), (3, 7, 2), (4, 9, 3), (2, 8, 4))
    for ranks, microbatches, chunks in sizes:
        for forward_only in (False, True):
            try:
                program = build_schedule(
                    name, ranks=ranks, microbatches=microbatches, chunks=chunks, forward_only=forward_only
                )
            except ValueError:
                continue
            lowered = lower(program, ahead)
            lowered.check()
            assert tuple(tuple(e for e in row if not isinstance(e, Command)) for row in lowered.ranks) == program.ranks
            verbs = Counter(entry.verb for row in lowered.ranks for entry in row if isinstance(entry, Command))
            assert verbs[Verb.SEND] == verbs[Verb.RECV]
            assert verbs[Verb.FREE] == microbatches * len(program.placement.places(0)) * ranks / len(
                program.placement.pipes
            )
            groups = 0 if forward_only else program.placement.stages * len(program.placement.pipes)
            assert verbs[Verb.REDUCE_GRAD] == groups
            assert verbs[Verb.REDUCE_REPLICA] == (groups if name == "dualpipe" else 0)


def work_of_lowering(microbatches: int, ranks: int) -> float:
    """Of lowering and its check, for each instruction."""
    program = build_schedule("combined_1f1b", ranks=ranks, microbatches=microbatches, chunks=2)
    return work(lambda: lower(program).check()) / sum(map(len, lower(program).ranks))


def test_work_grows_linearly() -> None:
    few = work_of_lowering(microbatches=16, ranks=4)
    assert work_of_lowering(microbatches=64, ranks=4) < 1.1 * few
    assert work_of_lowering(microbatches=16, ranks=16) < 1.1 * few


def edited(old: str, new: str, rank: int = 0) -> LoweredProgram:
    """Two ranks, two microbatches, with commands of one rank replaced by others of the same program."""
    lowered = lower(build_schedule("1f1b", ranks=2, microbatches=2))
    row = texts(lowered)[rank]
    assert old in row
    by_text = {str(entry): entry for entry in lowered.ranks[rank]}
    entries = tuple(by_text[text] for text in row.replace(old, new).split())
    return replace(lowered, ranks=tuple(entries if r == rank else other for r, other in enumerate(lowered.ranks)))


@pytest.mark.parametrize(
    ("lowered", "message"),
    [
        (edited("0SEND_F0 ", ""), "'1f1b' lowered, rank 0: 0SEND_F0 is missing"),
        (edited("0FREE0", "0FREE0 0FREE0"), "rank 0, position 8: 0FREE0 stands a second time"),
        (edited("0F0 0SEND_F0", "0SEND_F0 0F0"), "rank 0, position 0: 0SEND_F0 stands before 0F0, which it needs"),
        (edited("0RECV_B1 0B0 0FREE0 0B1", "0B0 0FREE0 0B1 0RECV_B1"), "0RECV_B1 stands behind 0B1, which needs it"),
        (edited("0B1 0FREE1 0REDUCE_GRAD", "0REDUCE_GRAD 0B1 0FREE1"), "0REDUCE_GRAD stands before 0B1, which it"),
        (
            edited("1RECV_F0 1RECV_F1", "1RECV_F1 1RECV_F0", 1),
            "rank 1, position 0: 1RECV_F1 is number 0 of the lane from rank 0, whose 0SEND_F0 comes then; allowed: the",
        ),
        (edited("0F0 0SEND_F0 0RECV_B0 0F1", "0F1 0F0 0SEND_F0 0RECV_B0"), ""),
        (
            edited("1RECV_F1 1F0 1B0 1SEND_B0 1FREE0", "1F0 1B0 1SEND_B0 1FREE0 1RECV_F1", 1),
            "",
        ),
    ],
)
def test_messages(lowered: LoweredProgram, message: str) -> None:
    if not message:
        lowered.check()
        return
    with pytest.raises(ValueError, match=message):
        lowered.check()


def test_sends_that_wait_for_their_receives() -> None:
    """Rank 0 sends F1 before it posts the receive of B0; rank 1 sends B0 before it posts that of F1."""
    lowered = edited("1RECV_F1 1F0 1B0 1SEND_B0 1FREE0", "1F0 1B0 1SEND_B0 1FREE0 1RECV_F1", 1)
    row = lowered.ranks[0]
    late = (*row[:2], *row[3:5], row[2], *row[5:])
    with pytest.raises(ValueError, match="waits forever with sends held until their receives are posted; allowed: no"):
        replace(lowered, ranks=(late, lowered.ranks[1])).check()


def test_a_negative_distance() -> None:
    with pytest.raises(ValueError, match="ahead=-1; allowed: 0 or more"):
        lower(build_schedule("1f1b", ranks=2, microbatches=2), ahead=-1)
