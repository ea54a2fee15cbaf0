"""Entries of objects' dictionaries that are others for a while: methods, children and options of a user's model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

Replacement = tuple[dict[str, Any], str, Any]
"""A dictionary, such as an object's ``__dict__``, a key, and the value to put there."""

_ABSENT = object()


@contextmanager
def replaced(replacements: Iterable[Replacement]) -> Iterator[None]:
    """Put values into dictionaries inside the context, and what was there before back after it."""
    held: list[Replacement] = []
    try:
        for table, key, value in replacements:
            held.append((table, key, table.get(key, _ABSENT)))
            table[key] = value
        yield
    finally:
        for table, key, before in reversed(held):
            if before is _ABSENT:
                del table[key]
            else:
                table[key] = before
