"""Worlds run in a process of their own, because they replace functions of torch for all of its threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import Ranks


@pytest.fixture(scope="session")
def alone() -> Iterator[Ranks]:
    """One process, kept for the session: ``alone.run(function, *args)`` with ``function(rank, size, *args)``."""
    workers = Ranks(1, timeout=120)
    yield workers
    workers.close()
