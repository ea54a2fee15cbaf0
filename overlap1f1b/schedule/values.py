"""Users' values: short texts for messages and tables, and checks of whole numbers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from math import inf
from numbers import Real
from reprlib import Repr
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

MOST = 80
"""Characters of a value that are shown."""
MOST_TEXT = 400
"""Characters of another library's message that are shown."""

_DIGITS = 10**MOST


class _Short(Repr):
    """A repr with a few elements of a large container, which never builds the whole text."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = self.maxdict = 4
        self.maxlist = self.maxtuple = self.maxset = 16
        self.maxstring = self.maxother = self.maxlong = MOST

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if -_DIGITS < x < _DIGITS else f"an integer of {x.bit_length()} bits"

    def repr_str(self, x: str, level: int) -> str:
        return repr(x) if len(x) <= MOST else f"{x[: MOST // 2]!r}… ({len(x)} characters)"


def quoted(value: object, *, plain: bool = False) -> str:
    """Return a value as text for a message, shortened if it is long.

    >>> quoted("2F0"), quoted("2F0", plain=True)
    ("'2F0'", '2F0')
    >>> quoted("F" * 1000)
    "'FFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFF'… (1000 characters)"

    Args:
        value: Any value, of any size.
        plain: Whether a short text on one line has no quotation marks.
    """
    if plain and isinstance(value, str) and len(value) <= MOST and value.isprintable():
        return value
    return shortened(_Short().repr(value))


def counted(count: int, noun: str) -> str:
    """Return a number and its noun.

    >>> counted(1, "layer"), counted(2, "microbatch")
    ('1 layer', '2 microbatches')
    """
    return f"{count} {noun}{'' if count == 1 else 'es' if noun.endswith('ch') else 's'}"


def shortened(text: str, most: int = MOST_TEXT) -> str:
    """Return a message in one line, shortened if it is long.

    >>> shortened("invalid literal: 'aaaaaaaaaaaaaaaa'", most=22)
    "invalid literal: 'aaaa… (35 characters)"
    """
    short = text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"
    return " ".join(short.splitlines())


def some(names: Sequence[str], most: int) -> str:
    """Return the first names, and how many more there are.

    >>> some(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def naming_nearest(call: Callable[P, R]) -> Callable[P, R]:
    """Let a function name the nearest of its arguments in the ``TypeError`` for a name that it does not have.

    >>> @naming_nearest
    ... def run(*, overlap=3, parts=1): ...
    >>> run(overlp=2)
    Traceback (most recent call last):
    TypeError: run has no overlp; allowed: overlap, parts; nearest: overlap
    """
    allowed = [name for name in inspect.signature(call).parameters if name != "self"]

    @functools.wraps(call)
    def checked(*args: P.args, **given: P.kwargs) -> R:
        for name in given:
            if name not in allowed:
                nearest = "".join(f"; nearest: {found}" for found in get_close_matches(name, allowed, 1))
                where = call.__qualname__.removesuffix(".__init__")
                raise TypeError(f"{where} has no {name}; allowed: {', '.join(allowed)}{nearest}")
        return call(*args, **given)

    return checked


def check_size(name: str, value: object, least: int = 1) -> None:
    """Raise ``ValueError`` for a value that is not a whole number, or is too small.

    >>> check_size("ranks", 2.5)
    Traceback (most recent call last):
    ValueError: ranks=2.5; allowed: a whole number, 1 or more

    Raises:
        ValueError: The value is not a whole number (a bool counts as none), or is less than ``least``.
    """
    if not hasattr(value, "__index__") or isinstance(value, bool):
        raise ValueError(f"{name}={quoted(value)}; allowed: a whole number, {least} or more")
    if value.__index__() < least:
        raise ValueError(f"{name}={quoted(value, plain=True)}; allowed: {least} or more")


def check_number(name: str, value: object, least: float = 0.0, *, above: bool = False) -> None:
    """Raise ``ValueError`` for what is no finite number (a bool is none), or less than ``least``; ``above`` it, more.

    >>> check_number("scaling", float("inf"), above=True)
    Traceback (most recent call last):
    ValueError: scaling=inf; allowed: a finite number, more than 0
    """
    real = isinstance(value, Real) and not isinstance(value, bool) and -inf < value < inf  # type: ignore[operator]
    if real and (value > least if above else value >= least):  # type: ignore[operator]
        return
    limit = "" if least == -inf else f", more than {least:g}" if above else f", {least:g} or more"
    raise ValueError(f"{name}={quoted(value, plain=real)}; allowed: a finite number{limit}")


def check_kind(name: str, value: object, *kinds: Any) -> None:
    """Raise ``ValueError`` for a value that is of none of these classes; None among them allows None.

    >>> check_kind("costs", 3, str, None)
    Traceback (most recent call last):
    ValueError: costs=3; allowed: str or None
    """
    if any(value is None if kind is None else isinstance(value, kind) for kind in kinds):
        return
    words = {None: "None", Callable: "a function", bool: "True or False"}
    allowed = " or ".join(words.get(kind) or kind.__name__ for kind in kinds)
    raise ValueError(f"{name}={quoted(value)}; allowed: {allowed}")


def check_each(name: str, values: Any, kind: type[T]) -> list[T]:
    """Return values as a list; raise ``ValueError`` if they are not several, or one of them is of another class.

    >>> check_each("observers", ["x"], dict)
    Traceback (most recent call last):
    ValueError: observers[0]='x'; allowed: dict
    """
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ValueError(f"{name}={quoted(values)}; allowed: a list of {kind.__name__}")
    several = list(values)
    for number, value in enumerate(several):
        check_kind(f"{name}[{number}]", value, kind)
    return several
