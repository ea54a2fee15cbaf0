"""Whole numbers, and what is none."""

from __future__ import annotations

import pytest

from overlap1f1b.schedule.sizes import check_size


class Index:
    """As numpy's integers are."""

    def __index__(self) -> int:
        return 3

    def __repr__(self) -> str:
        return "three"


def test_whole_numbers_of_any_type_pass() -> None:
    check_size("ranks", 1)
    check_size("ranks", 10**30)
    check_size("ranks", Index(), 3)
    check_size("ahead", 0, 0)


@pytest.mark.parametrize(
    ("value", "least", "message"),
    [
        (0, 1, "ranks=0; allowed: 1 or more"),
        (-1, 0, "ranks=-1; allowed: 0 or more"),
        (Index(), 4, "ranks=three; allowed: 4 or more"),
        (2.0, 1, "ranks=2.0; allowed: a whole number, 1 or more"),
        (float("nan"), 0, "ranks=nan; allowed: a whole number, 0 or more"),
        ("2", 1, "ranks='2'; allowed: a whole number, 1 or more"),
        (None, 1, "ranks=None; allowed: a whole number, 1 or more"),
        (True, 1, "ranks=True; allowed: a whole number, 1 or more"),
    ],
)
def test_others_are_refused(value: object, least: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        check_size("ranks", value, least)
