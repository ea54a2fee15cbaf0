"""JSON that is too large to be held: one event of ``traceEvents`` at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import IO, Any

_CHUNK = 1 << 22
_BLANK = re.compile(r"[\s,]*")
_VALUE = json.JSONDecoder()

Event = dict[str, Any]
TRUNCATED = "it is truncated, its end is missing"


def read_events(file: IO[str], take: Callable[[Event], None], key: str = "traceEvents") -> dict[str, Any]:
    """Passes every element of one top-level array on, and returns the other top-level values, with True for the array.

    A file that is an array itself is that array.

    Args:
        file: JSON text.
        take: Called with each element.
        key: Of the array.

    Raises:
        ValueError: The text ends too early, or is no JSON object or array.
    """
    return _Reader(file).whole(take, key)


class _Reader:
    def __init__(self, file: IO[str]) -> None:
        self._file, self._text, self._at, self._ended = file, "", 0, False

    def whole(self, take: Callable[[Event], None], key: str) -> dict[str, Any]:
        others: dict[str, Any] = {}
        first = self._peek()
        if first == "[":
            self._array(take)
            others[key] = True
        elif first == "{":
            self._at += 1
            while self._peek() != "}":
                name = self._value()
                if self._peek() != ":":
                    raise ValueError("it is no JSON object")
                self._at += 1
                if self._peek() == "[" and name == key:
                    self._array(take)
                    others.setdefault(key, True)
                else:
                    others[name] = self._value()
        else:
            raise ValueError("it is no JSON object or array")
        return others

    def _array(self, take: Callable[[Event], None]) -> None:
        self._at += 1
        while self._peek() != "]":
            take(self._value())
            self._take_whole(take)
        self._at += 1

    def _take_whole(self, take: Callable[[Event], None]) -> None:
        """Passes on elements as far as the text goes; of numbers nobody knows whether they end with it."""
        text, at, end = self._text, self._at, len(self._text)
        decode, skip = _VALUE.raw_decode, _BLANK.match
        while True:
            found = skip(text, at)
            assert found is not None
            at = self._at = found.end()
            if at == end or text[at] not in "{[":
                return
            try:
                value, at = decode(text, at)
            except json.JSONDecodeError:
                return
            self._at = at
            take(value)

    def _peek(self) -> str:
        """The next character that is neither blank nor comma."""
        while True:
            found = _BLANK.match(self._text, self._at)
            assert found is not None
            self._at = found.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                raise ValueError(TRUNCATED)
            self._fill()

    def _value(self) -> Any:
        """The value that begins here, and goes behind it."""
        while True:
            try:
                value, end = _VALUE.raw_decode(self._text, self._at)
                if self._ended or not isinstance(value, int | float) or end + 2 < len(self._text):
                    self._at = end
                    return value  # a number may go on behind the text so far, as 1e-5 does behind 1e-
            except json.JSONDecodeError as error:
                if self._ended:
                    raise ValueError(f"it is truncated, or no JSON ({error.msg})") from None
            self._fill()

    def _fill(self) -> None:
        """Reads on, as much again as there is."""
        left = self._text[self._at :]
        more = self._file.read(max(_CHUNK, len(left)))
        self._text, self._at, self._ended = left + more, 0, not more
