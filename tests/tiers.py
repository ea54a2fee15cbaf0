"""Each case of a test says its tier: `pytest` tries the first one, `pytest -m wide` the others.

    @pytest.mark.wide                                           # all cases of a test
    @pytest.mark.parametrize("ranks", [2, *wide(3, 4)])         # 3 and 4, not 2
    @pytest.mark.parametrize("name", first(NAMES, "plain"))     # of NAMES all but "plain"

A case that is a tuple has a value for each name.
"""

from collections.abc import Iterable
from typing import Any

import pytest


def wide(*cases: Any) -> list[Any]:
    """Cases of `parametrize`, or of a fixture's `params`, as wide ones."""
    return [_param(case, pytest.mark.wide) for case in cases]


def first(cases: Iterable[Any], *tried: Any) -> list[Any]:
    """All cases, of which those that are `tried` in the first tier hold the claim; the others are wide."""
    cases = list(cases)
    assert all(case in cases for case in tried), f"{tried}; cases: {cases}"
    return [_param(case, *([] if case in tried else [pytest.mark.wide])) for case in cases]


def _param(case: Any, *marks: pytest.MarkDecorator) -> Any:
    if hasattr(case, "marks"):  # of pytest.param
        return case._replace(marks=(*case.marks, *marks))
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks)
