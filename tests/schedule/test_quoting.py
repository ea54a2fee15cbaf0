"""Values in messages: short ones as they are, long ones cut without their whole text being built."""

from __future__ import annotations

from typing import Any

import pytest

from overlap1f1b.schedule.quoting import MOST, MOST_TEXT, cut, quoted


@pytest.mark.parametrize(
    "value", ["2F0", "a'b\n", 12, -5, 1.5, None, True, [0, 2], (1, "b"), {"a": 7}, b"x", "é" * MOST]
)
def test_short_values_are_shown_whole(value: Any) -> None:
    assert quoted(value) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        "x" * 10**7,
        "\n" * 10**7,
        "\x00" * 10**6,
        10**5000,
        -(10**5000),
        list(range(10**6)),
        [["y" * 10**6] * 1000] * 1000,
        {"k" * 10**6: "v" * 10**6},
        {n: n for n in range(10**5)},
        b"z" * 10**6,
        (1.5,) * 10**6,
    ],
    ids=type,  # pytest's own would be texts of these
)
@pytest.mark.parametrize("plain", [False, True])
def test_long_values_are_cut(value: Any, plain: bool) -> None:
    text = quoted(value, plain=plain)
    assert len(text) < 2 * MOST_TEXT
    assert text.isprintable()


def test_plain_text_has_no_marks() -> None:
    assert quoted("dense.weight", plain=True) == "dense.weight"
    assert quoted("two\nlines", plain=True) == r"'two\nlines'"
    assert quoted("m" * 81, plain=True) == f"'{'m' * 40}'… (81 characters)"


def test_a_message_is_one_line() -> None:
    assert cut("one\ntwo\r\nthree") == "one two three"
    assert cut("e" * 10**6) == "e" * MOST_TEXT + "… (1000000 characters)"
