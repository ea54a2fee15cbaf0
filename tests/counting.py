"""How much work something is, without a clock."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def work(of: Callable[[], object]) -> int:
    """Lines of Python that are run and calls of C functions: loops count, wherever they stand."""
    count = 0

    def line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return line

    def call(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "c_call"

    before = sys.gettrace(), sys.getprofile()
    sys.settrace(line)
    sys.setprofile(call)
    try:
        of()
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
    return count
