"""What ``--wire`` takes: a rate, or one that makes exchange as long as compute."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
MIN_RATE = 1e4  # bits per second; well below it, at 1 kbit/s, the time of a burst overflows tc's 32 bits


@dataclass(frozen=True)
class Balanced:
    """The rate at which exchange takes as long as compute, times ``factor``."""

    factor: float = 1.0


def parse_wire(text: str) -> float | Balanced:
    """Bits per second, or what they are to be found from.

    >>> parse_wire("2.5gbit"), parse_wire("balanced"), parse_wire("balanced*0.5")
    (2500000000.0, Balanced(factor=1.0), Balanced(factor=0.5))

    Raises:
        ValueError: Neither.
    """
    name, times, factor = text.partition("*")
    with contextlib.suppress(ValueError):
        if name != "balanced":
            return parse_rate(text)
        if not times:
            return Balanced()
        if 0 < float(factor) < float("inf"):
            return Balanced(float(factor))
    raise ValueError(
        f"--wire {text!r}; allowed: a rate such as 100kbit, 500mbit or 2.5gbit (10kbit or more), balanced, "
        "or balanced*FACTOR with a factor above 0"
    )


def parse_rate(text: str) -> float:
    """Bits per second.

    >>> parse_rate("2.5gbit")
    2500000000.0

    Raises:
        ValueError: It is not a number and a unit, or too low for tc.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text, re.IGNORECASE | re.ASCII)
    rate = float(match[1]) * UNITS[match[2].lower()] if match else 0.0
    if rate < MIN_RATE:
        raise ValueError(
            f"rate {text!r} is not a number and a unit, such as 100kbit, 500mbit or 2.5gbit (10kbit or more)"
        )
    return rate


def parse_loopback(text: str) -> float | None:
    """Gigabytes per second of ``loopback:GB/s``, None for ``loopback``.

    >>> parse_loopback("loopback:12.5"), parse_loopback("loopback")
    (12.5, None)

    Raises:
        ValueError: Anything else.
    """
    name, colon, rate = text.partition(":")
    if name == "loopback" and not colon:
        return None
    try:
        if name == "loopback" and 0 < float(rate) < float("inf"):
            return float(rate)
    except ValueError:
        pass
    raise ValueError(f"--exchange {text}; allowed: loopback or loopback:GB/s, as loopback:20")
