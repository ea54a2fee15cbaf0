"""Whole numbers that users give."""

from __future__ import annotations

from overlap1f1b.schedule.quoting import quoted


def check_size(name: str, value: object, least: int = 1) -> None:
    """Refuses what is no whole number, or too small.

    >>> check_size("ranks", 2.5)
    Traceback (most recent call last):
    ValueError: ranks=2.5; allowed: a whole number, 1 or more

    Raises:
        ValueError: Another type than a whole number's, a bool too, or less than ``least``.
    """
    if not hasattr(value, "__index__") or isinstance(value, bool):
        raise ValueError(f"{name}={quoted(value)}; allowed: a whole number, {least} or more")
    if value.__index__() < least:
        raise ValueError(f"{name}={quoted(value, plain=True)}; allowed: {least} or more")
