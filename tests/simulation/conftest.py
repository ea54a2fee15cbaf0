"""What this folder plans is compiled with few tries, unless a test asks for all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.plan.tries import few_tries


@pytest.fixture(autouse=True)
def _few_tries() -> Iterator[None]:
    with few_tries():
        yield
