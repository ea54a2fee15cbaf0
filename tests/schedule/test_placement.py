"""Where stages lie."""

import pytest

from overlap1f1b.schedule import Placement
from overlap1f1b.schedule.placement import SINGLE


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_loops_and_vs(ranks: int) -> None:
    """A loop gives every rank its chunks, a V comes back to the first rank."""
    loop, v = Placement.loop(ranks, 4), Placement.v(ranks)
    assert (loop.ranks, loop.stages, loop.share) == (ranks, 4 * ranks, 0.25)
    assert (v.ranks, v.stages, v.share) == (ranks, 2 * ranks, 0.5)
    for rank in range(ranks):
        assert loop.places(rank) == tuple((0, rank + chunk * ranks) for chunk in range(4))
        assert v.places(rank) == ((0, rank), (0, 2 * ranks - 1 - rank))


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
    assert Placement.loop(1) == SINGLE


@pytest.mark.parametrize(
    ("pipes", "message"),
    [
        ((), "pipes of .* stages; allowed: one or more pipes"),
        (((),), r"pipes of \[0\] stages"),
        (((0, 1), (0,)), r"pipes of \[1, 2\] stages; allowed: one or more pipes of one length"),
        (((0, 2),), r"stages on ranks \[0, 2\]; allowed: every rank from 0 to the last"),
        (((-1, 0),), r"stages on ranks \[-1, 0\]"),
        (((0, "1"),), r"^pipes=\(\(0, '1'\),\); allowed: a tuple of a tuple of whole numbers$"),
        ((0, 1), r"^pipes=\(0, 1\); allowed: a tuple of a tuple of whole numbers$"),
        (((0.0, 1.0),), "; allowed: a tuple of a tuple of whole numbers$"),
        (5, "^pipes=5; allowed: a tuple of a tuple of whole numbers$"),
    ],
)
def test_refusals(pipes: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Placement(pipes)
