"""Processes that keep Megatron-Core imported."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.ranks import Ranks


@pytest.fixture(scope="package")
def megatron() -> Iterator[Callable[[int], Ranks]]:
    """Processes by their number. Each call has process groups of its own, which end with it."""
    workers: dict[int, Ranks] = {}

    def kept(size: int) -> Ranks:
        if size not in workers:
            workers[size] = Ranks(size, timeout=120)
        return workers[size]

    yield kept
    for ranks in workers.values():
        ranks.close()
