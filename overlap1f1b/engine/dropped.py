"""What a call of experts has no room for."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Dropped(NamedTuple):
    """Rows that one call of experts had no room for.

    Args:
        block: Of the stage.
        microbatch: Its number.
        rows: ``[E]`` int64 on the device, of each expert.
        counts: ``[E]`` int64 on the device, those that were sent.
        room: For rows to each rank.
    """

    block: int
    microbatch: int
    rows: Tensor
    counts: Tensor
    room: int
