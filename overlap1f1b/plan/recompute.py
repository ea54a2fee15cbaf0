"""Which activations are dropped after a forward and computed again before their backward."""

from __future__ import annotations

from typing import Literal, get_args

Recompute = Literal["none", "experts", "attention", "block"]
"""What is dropped: nothing; what the experts compute; all else in a block (of a dense block everything); or both."""


def parse_recompute(value: str) -> Recompute:
    """The mode of a text.

    >>> parse_recompute("block")
    'block'

    Raises:
        ValueError: No mode.
    """
    for mode in get_args(Recompute):
        if value == mode:
            return mode
    raise ValueError(f"recompute={value!r}; allowed: {', '.join(get_args(Recompute))}")
