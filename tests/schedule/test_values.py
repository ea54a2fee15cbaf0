"""Values in messages: short ones as they are, long ones cut without their whole text being built."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from overlap1f1b.schedule.values import MOST, MOST_TEXT, check_size, checked, quoted, shortened


@pytest.mark.parametrize(
    "value", ["2F0", "a'b\n", 12, -5, 1.5, None, True, [0, 2], (1, "b"), {"a": 7}, b"x", "é" * MOST]
)
def test_short_values_are_shown_whole(value: Any) -> None:
    assert quoted(value) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        "x" * 10**7,
        "\x00" * 10**6,
        -(10**5000),
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
    assert shortened("one\ntwo\r\nthree") == "one two three"
    assert shortened("e" * 10**6) == "e" * MOST_TEXT + "… (1000000 characters)"


class Index:
    """As numpy's integers are."""

    def __index__(self) -> int:
        return 3

    def __repr__(self) -> str:
        return "three"


def test_whole_numbers_of_any_type_pass() -> None:
    check_size("ranks", 10**30)
    check_size("ranks", Index(), 3)
    check_size("ahead", 0, 0)


@pytest.mark.parametrize(
    ("value", "least", "message"),
    [
        (0, 1, "ranks=0; allowed: 1 or more"),
        (Index(), 4, "ranks=three; allowed: 4 or more"),
        (float("nan"), 0, "ranks=nan; allowed: a whole number, 0 or more"),
        ("2", 1, "ranks='2'; allowed: a whole number, 1 or more"),
        (None, 1, "ranks=None; allowed: a whole number, 1 or more"),
        (True, 1, "ranks=True; allowed: a whole number, 1 or more"),
    ],
)
def test_others_are_refused(value: object, least: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        check_size("ranks", value, least)


if TYPE_CHECKING:
    from torch import Tensor


@checked
def taking(
    name: str,
    *,
    truth: bool | None = None,
    word: Literal["a", "b"] = "a",
    table: Mapping[str, int] | None = None,
    call: Callable[[], int] | None = None,
    words: Sequence[Literal["a", "b"]] = (),
    numbers: Sequence[float] | None = None,
    one_or_several: str | Sequence[str] = "",
    path: str | Path = "",
    later: Later | None = None,
    size: int = 1,
    unknown: Tensor | None = None,
    anything: Any = None,
) -> bool:
    """Take a value of each kind."""
    return True


class Later:
    """A class that stands below the function that takes it."""


@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        ({"name": 3}, "str"),
        ({"truth": "no"}, "True, False, or None"),
        ({"truth": 1}, "True, False, or None"),
        ({"word": "c"}, "a or b"),
        ({"word": ["a"]}, "a or b"),
        ({"table": [1]}, "Mapping or None"),
        ({"call": "x"}, "a function or None"),
        ({"words": "ab"}, "a list of a or b"),
        ({"words": ("a", "c")}, "a list of a or b"),
        ({"words": {"c"}}, "a list of a or b"),
        ({"numbers": "121"}, "a list of numbers or None"),
        ({"numbers": [1.0, True]}, "a list of numbers or None"),
        ({"numbers": 3}, "a list of numbers or None"),
        ({"path": 5}, "str or PathLike"),
        ({"later": 5}, "Later or None"),
    ],
)
def test_arguments_are_of_their_annotated_kinds(given: dict[str, Any], allowed: str) -> None:
    ((name, value),) = given.items()
    with pytest.raises(ValueError, match=f"^{re.escape(f'{name}={value!r}; allowed: {allowed}')}$"):
        taking(**{"name": "x"} | given)


def test_what_an_annotation_cannot_tell_is_left_to_the_function() -> None:
    right = {
        "truth": False,
        "word": "b",
        "table": {},
        "call": dict,
        "words": ["a"],
        "numbers": iter([1]),
        "later": Later(),
    }
    left = {"one_or_several": 3, "size": "x", "unknown": 3, "anything": object, "path": Path()}
    assert taking("x", **right, **left)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^taking has no trth; allowed: name, truth, .*; nearest: truth$"):
        taking("x", trth=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^taking\(…, 4\) without a name; allowed: truth=, word=, .*anything=$"):
        taking("x", 4)  # type: ignore[misc]
