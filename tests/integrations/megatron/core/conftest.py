"""Processes that keep Megatron-Core imported, in place of those of other tests."""

from collections.abc import Iterator

import pytest

from tests.ranks import Kept


@pytest.fixture(scope="package")
def kept() -> Iterator[Kept]:
    """Each call has process groups of its own, which end with it."""
    workers = Kept(timeout=120)
    yield workers
    workers.close()
