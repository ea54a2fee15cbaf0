"""What fails a test that runs on ranks."""

import pytest

from tests.ranks import RankError, Ranks, over


@over(2)
def returns(rank: int, size: int) -> bool:
    return rank == size


@over(2)
def fails_on_one(rank: int, size: int, message: str) -> None:
    assert rank == 0, f"{message} {rank}"


def test_a_body_that_returns_something_fails(kept: dict[int, Ranks]) -> None:
    with pytest.raises(AssertionError, match=r"^the body returned \[False, False\]; allowed: None"):
        returns(kept=kept)


def test_an_assertion_on_one_rank_fails_the_test_with_its_message(kept: dict[int, Ranks]) -> None:
    with pytest.raises(RankError, match="AssertionError: said by rank 1"):
        fails_on_one(kept=kept, message="said by rank")
