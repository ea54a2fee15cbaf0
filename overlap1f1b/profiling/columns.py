"""Rows of whole numbers, appended one by one and read as columns."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class Columns:
    """A growing table of ``width`` columns; eight bytes a number.

    >>> table = Columns(2)
    >>> table.append((1, 10))
    >>> table.append((2, 20))
    >>> [column.tolist() for column in table.arrays]
    [[1, 2], [10, 20]]
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self._flat = array("q")

    def append(self, row: tuple[int, ...]) -> None:
        """Adds a row."""
        self._flat.extend(row)

    def extend(self, rows: Iterable[tuple[int, ...]]) -> None:
        """Adds many."""
        for row in rows:
            self._flat.extend(row)

    def __len__(self) -> int:
        return len(self._flat) // self.width

    @property
    def arrays(self) -> tuple[NDArray[np.int64], ...]:
        """The columns, each ``[rows]``."""
        table = np.array(self._flat, np.int64).reshape(-1, self.width)
        return tuple(np.ascontiguousarray(table[:, column]) for column in range(self.width))
