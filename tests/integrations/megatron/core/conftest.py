"""Processes that keep Megatron-Core imported, in place of those of other tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import Ranks


class Kept(dict[int, Ranks]):
    """Processes by their number; they start with the first test that needs so many."""

    def __missing__(self, size: int) -> Ranks:
        self[size] = Ranks(size, timeout=120)
        return self[size]


@pytest.fixture(scope="package")
def kept() -> Iterator[Kept]:
    """Each call has process groups of its own, which end with it."""
    workers = Kept()
    yield workers
    for ranks in workers.values():
        ranks.close()
