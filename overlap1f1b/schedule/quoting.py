"""Values of users' files in messages: as much of them as a line has room for."""

from __future__ import annotations

from reprlib import Repr

MOST = 80
"""Characters of a value that are shown."""
MOST_TEXT = 400
"""Characters of a message of somebody else's that are shown."""

_DIGITS = 10**MOST


class _Short(Repr):
    """Shows a few elements of what holds many, and never builds the whole text."""

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
    """A value as in a message, cut where it is long.

    >>> quoted("2F0"), quoted("2F0", plain=True)
    ("'2F0'", '2F0')
    >>> quoted("F" * 1000)
    "'FFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFF'… (1000 characters)"

    Args:
        value: Of whatever type and size.
        plain: Whether a short text on one line stands without quotation marks.
    """
    if plain and isinstance(value, str) and len(value) <= MOST and value.isprintable():
        return value
    return cut(_Short().repr(value))


def cut(text: str, most: int = MOST_TEXT) -> str:
    """A message in one line, cut where it is long.

    >>> cut("invalid literal: 'aaaaaaaaaaaaaaaa'", most=22)
    "invalid literal: 'aaaa… (35 characters)"
    """
    short = text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"
    return " ".join(short.splitlines())
