"""Plans of this folder are compiled with few tries, unless a test asks for all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.plan.tries import few_tries


@pytest.fixture(autouse=True)
def _few_tries() -> Iterator[None]:
    with few_tries(0.0, 0.4):
        yield
