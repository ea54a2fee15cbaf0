"""Where stages lie."""

from __future__ import annotations

import pytest

from overlap1f1b.schedule import Placement
from overlap1f1b.schedule.placement import SINGLE


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_loop_gives_every_rank_its_chunks(ranks: int, chunks: int) -> None:
    placement = Placement.loop(ranks, chunks)
    assert (placement.ranks, placement.stages, placement.share) == (ranks, ranks * chunks, 1 / chunks)
    for rank in range(ranks):
        assert placement.places(rank) == tuple((0, rank + chunk * ranks) for chunk in range(chunks))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_v_comes_back_to_the_first_rank(ranks: int) -> None:
    placement = Placement.v(ranks)
    assert (placement.ranks, placement.stages, placement.share) == (ranks, 2 * ranks, 0.5)
    for rank in range(ranks):
        assert placement.places(rank) == ((0, rank), (0, 2 * ranks - 1 - rank))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_bidirectional_ties_two_ranks_by_each_group(ranks: int) -> None:
    placement = Placement.bidirectional(ranks)
    assert (placement.ranks, placement.stages, placement.share) == (ranks, ranks, 1.0)
    for rank in range(ranks):
        other = ranks - 1 - rank
        assert placement.places(rank) == ((0, rank), (1, other))
        assert placement.replicas(rank) == tuple(sorted({rank, other}))
        assert (placement.rank(0, rank), placement.rank(1, rank)) == (rank, other)


def test_pipes_share_the_microbatches() -> None:
    assert SINGLE.microbatches(0, 5) == range(5)
    assert [Placement.bidirectional(2).microbatches(p, 5) for p in (0, 1)] == [range(3), range(3, 5)]


def test_single() -> None:
    assert Placement.loop(1) == SINGLE


@pytest.mark.parametrize(
    ("pipes", "message"),
    [
        ((), "pipes of .* stages; allowed: one or more pipes"),
        (((),), r"pipes of \[0\] stages"),
        (((0, 1), (0,)), r"pipes of \[1, 2\] stages; allowed: one or more pipes of one length"),
        (((0, 2),), r"stages on ranks \[0, 2\]; allowed: every rank from 0 to the last"),
        (((-1, 0),), r"stages on ranks \[-1, 0\]"),
        (((0, "1"),), r"stages on ranks \[0, '1'\]"),
    ],
)
def test_refusals(pipes: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Placement(pipes)
