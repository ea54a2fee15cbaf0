"""Fixtures that several folders of tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything imports torch: ranks and tests share the processors

from tests.ranks import Ranks


@pytest.fixture(scope="session")
def ranks2() -> Iterator[Ranks]:
    """Two processes with a gloo group, kept for the session: `ranks2.run(function, *args)`."""
    workers = Ranks(2)
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def ranks8() -> Iterator[Ranks]:
    """Eight processes with a gloo group, kept for the session: `ranks8.run(function, *args)`."""
    workers = Ranks(8, timeout=180)
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def ranks4() -> Iterator[Ranks]:
    """Four processes with a gloo group, kept for the session: `ranks4.run(function, *args)`."""
    workers = Ranks(4)
    yield workers
    workers.close()
