"""Worlds run in a process of their own, because they replace functions of torch for all of its threads."""

from collections.abc import Iterator

import pytest

from tests.ranks import Ranks


@pytest.fixture(scope="session")
def kept() -> Iterator[dict[int, Ranks]]:
    """One process, kept for the session, for bodies of ``@over(1)``."""
    workers = Ranks(1, timeout=120)
    yield {1: workers}
    workers.close()
