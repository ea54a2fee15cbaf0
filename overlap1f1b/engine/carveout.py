"""Multiprocessors that compute leaves to exchanges."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Carveout:
    """While an exchange is in flight, persistent kernels use that many multiprocessors fewer.

    torch's matrix products (those of cuBLAS, grouped and row-wise scaled ones) and FlashAttention 3 otherwise have a
    block for every one and run in two waves where some are taken, up to twice as long. What is queued before an
    exchange is launched, or after it is awaited, has them all.

    Args:
        sms: How many; 0 does nothing.
        set_carveout: What tells torch; None where it has no such thing.
    """

    def __init__(self, sms: int, set_carveout: Callable[[int | None], None] | None = None) -> None:
        self.sms = sms
        self._set = set_carveout or getattr(torch._C, "_set_sm_carveout_experimental", None)
        self._flying = 0

    def launched(self) -> None:
        """An exchange is in flight."""
        self._flying += 1
        if self._flying == 1:
            self._apply(self.sms)

    def awaited(self) -> None:
        """Compute waits for one of them."""
        self._flying -= 1
        if self._flying == 0:
            self._apply(None)

    def clear(self) -> None:
        """None is in flight."""
        if self._flying:
            self._flying = 0
            self._apply(None)

    def _apply(self, sms: int | None) -> None:
        if self.sms and self._set is not None:
            self._set(sms)
