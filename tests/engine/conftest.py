"""Engines of this folder compile their plans with few tries: what is said of them holds for every plan."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.plan.tries import few_tries


@pytest.fixture(autouse=True)
def _few_tries() -> Iterator[None]:
    with few_tries():
        yield
