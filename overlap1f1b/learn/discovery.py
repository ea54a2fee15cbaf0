"""What the first step shows of exchanges that blocks make by themselves."""

from __future__ import annotations

from collections.abc import Iterable

from overlap1f1b.cut.stage import Stage
from overlap1f1b.play.observers import Observer
from overlap1f1b.play.times import Times


class Discovery(Observer):
    """Lets blocks show, in the step that it looks on at, which exchanges they make by themselves."""

    rehearses = True

    def __init__(self, stages: Iterable[Stage]) -> None:
        self._stages = list(stages)

    def begin(self, times: Times) -> None:
        for stage in self._stages:
            stage.look_for_exchanges()
