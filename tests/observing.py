"""Observers of steps, for tests."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

from overlap1f1b.plan import Node
from overlap1f1b.play.observers import Contexts
from overlap1f1b.play.times import Times


class Around(Contexts):
    """Runs every compute node in a context, in the plan's own order."""

    keeps_order = True

    def __init__(self, context: Callable[[Node], AbstractContextManager[object]], *, acts: bool = False) -> None:
        super().__init__()
        self._context, self.acts = context, acts

    def around(self, node: Node, inside: ExitStack) -> None:
        inside.enter_context(self._context(node))


class Last(Contexts):
    """Keeps the times of the last step; with ``keeps_order`` in the plan's own order."""

    times: Times

    def __init__(self, *, keeps_order: bool = False) -> None:
        super().__init__()
        self.keeps_order = keeps_order

    def begin(self, times: Times) -> None:
        self.times = times
