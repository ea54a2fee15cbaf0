"""How often tokens are sent, against every choice there is, and the bytes of rows."""

import re
from itertools import combinations
from statistics import mean
from typing import Any

import pytest

from overlap1f1b.plan import exchanged_bytes, row_bytes, rows_per_token


@pytest.mark.parametrize(
    ("experts", "chosen", "ranks"), [(8, 2, 2), (8, 3, 4), (6, 5, 3), (4, 1, 4), (4, 0, 2), (7, 2, 1)]
)
def test_against_all_choices(experts: int, chosen: int, ranks: int) -> None:
    every = [len({expert * ranks // experts for expert in choice}) for choice in combinations(range(experts), chosen)]
    assert rows_per_token(experts, chosen, ranks) == pytest.approx(mean(every))


@pytest.mark.parametrize(
    ("routing", "shares"),
    [
        ({"experts": 128, "chosen": 8}, {2: 0.25, 4: 0.45, 8: 0.67, 16: 0.82}),  # Qwen3
        ({"experts": 256, "chosen": 8, "groups": 8, "top_groups": 4}, {2: 0.25, 4: 0.39, 8: 0.49}),  # DeepSeek
    ],
)
def test_shares_of_a_row_for_each_choice(routing: dict[str, int], shares: dict[int, float]) -> None:
    for ranks, share in shares.items():
        assert rows_per_token(**routing, ranks=ranks) / routing["chosen"] == pytest.approx(share, abs=0.006)


def test_groups_that_leave_no_choice_between_ranks() -> None:
    """With a group for each rank a token is sent to as many ranks as it has groups, if it takes some of each."""
    assert 3.9 < rows_per_token(256, 64, 8, 8, 4) <= 4
    assert rows_per_token(16, 2, 4, 4, 1) == 1


def test_bytes() -> None:
    assert row_bytes(2048, 8, 2, 2) == 4096 + 32
    assert row_bytes(5, 1, 4, 8) == 32
    assert row_bytes(2048, 8, 2, 2, "fp8") == 2048 + 48  # a scale of 4 bytes, and 32 as before, in steps of 16
    assert row_bytes(2048, 8, 2, 2, "mxfp8") == 2048 + 64 + 32  # a byte of each 32 elements' scale
    with pytest.raises(ValueError, match=r"^precision='fp4'; allowed: None, 'fp8', 'mxfp8'$"):
        row_bytes(2048, 8, 2, 2, "fp4")
    there, back = exchanged_bytes(1000, 2048, 128, 8, 4)
    rows = 1000 * rows_per_token(128, 8, 4) * 3 / 4
    assert (there, back) == (pytest.approx(rows * 4128), pytest.approx(rows * 4096))


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ((8, 2, 3), "ranks=3 for 8 experts; allowed: a divisor of 8"),
        ((8, 2, 2, 3), "groups=3 for 8 experts; allowed: a divisor of 8"),
        ((8, 2, 2, 4, 5), "top_groups=5 of 4 groups; allowed: 1 to 4"),
        ((8, 3, 2, 4, 1), "chosen=3 of 2 experts; allowed: 0 to 2"),
    ],
)
def test_refused(given: tuple[Any, ...], error: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(error)}$"):
        rows_per_token(*given)
