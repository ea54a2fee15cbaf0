"""Entries of objects' dictionaries that are others for a while: methods, children and options of a user's model."""

from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, TypeGuard

Replacement = tuple[MutableMapping[str, Any], str, Any]
"""A dictionary, such as an object's ``__dict__``, a key, and the value to put there."""

ABSENT: Any = object()
"""The value of an entry that is not there."""


def is_table(value: Any) -> TypeGuard[dict[Any, Any]]:
    """Return whether a value is a dictionary whose entries are read as they are: others make values when asked."""
    kind = type(value)
    return isinstance(value, dict) and kind.get is dict.get and kind.__getitem__ is dict.__getitem__


def put(table: MutableMapping[str, Any], key: str, value: Any) -> None:
    """Set an entry, or remove it for :data:`ABSENT`."""
    if value is ABSENT:
        table.pop(key, None)
    else:
        table[key] = value


@contextmanager
def replaced(replacements: Iterable[Replacement]) -> Iterator[None]:
    """Put values into dictionaries inside the context, and what was there before back after it."""
    held: list[Replacement] = []
    try:
        for table, key, value in replacements:
            held.append((table, key, table.get(key, ABSENT)))
            table[key] = value
        yield
    finally:
        for before in reversed(held):
            put(*before)
