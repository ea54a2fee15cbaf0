"""Who looks on while the nodes of a step are played: the one way to stand between a plan and what it does.

The player tells its observers of every node, in the order in which it plays them:

    begin(times)
    for each node:
        before(node)            nothing of it has begun
        ready(node, received)   it has all that it waits for, and starts now
        after(node)             it has computed, or its transfer has started
    end(failed)

A weight gradient that fills a wait has its own three calls, between ``before`` and ``ready`` of the node that waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from overlap1f1b.cut.stage import Stage
from overlap1f1b.moe.route import Route
from overlap1f1b.plan import RECOMPUTES, Node, Place, Resource
from overlap1f1b.play.crossing import Lookout
from overlap1f1b.play.times import Times
from overlap1f1b.schedule import Kind
from overlap1f1b.transport import devices


class ExpertCall(NamedTuple):
    """A call of experts in a forward, whose rows are about to leave.

    Args:
        stage, block, call, microbatch: Numbers.
        where: Name of the block.
        route: Where its rows go.
        rows: ``[T, H]`` or wider, the rows themselves.
    """

    stage: int
    block: int
    call: int
    microbatch: int
    where: str
    route: Route
    rows: Tensor


class Observer:
    """Looks on at the nodes of steps. A class overrides what it wants to be told; the rest costs nothing.

    Attributes:
        keeps_order: Whether weight gradients must not be played before their turn while it looks on.
        acts: Whether a step leaves something else with it than without, such as sums of gradients over ranks. A step
            that is compared with a plain loop is then compared without it, and played once more.
        rehearses: Whether it also looks on where a step is played only to be compared.
        by_node: Whether it must be told of every node, and not of the first alone of those that are one call.
    """

    keeps_order = False
    acts = False
    rehearses = False
    by_node = True

    def begin(self, times: Times) -> None:
        """Prepare for a step; ``times`` has its nodes, and is filled while they are played."""

    def before(self, node: Node) -> None:
        """Note that a node comes next."""

    def ready(self, node: Node, received: Mapping[Place, Any]) -> None:
        """Note that a node starts; ``received`` is what the exchanges before it have brought."""

    def after(self, node: Node) -> None:
        """Note that a node has ended on this thread. A gather has so twice: where it starts, and where it is taken."""

    def routed(self, call: ExpertCall) -> None:
        """Note a call of experts."""

    def lookout(self, stage: Stage, block: int, microbatch: int) -> Lookout | None:
        """Return who looks at the exchanges that a block makes by itself, in a forward that begins; None for nobody."""
        return None

    def end(self, *, failed: bool) -> None:
        """Note that the step has ended, or has failed: between any two of the calls above."""


class Observers:
    """Several observers, the first the outermost: it is told first, and of ``after`` and ``end`` last."""

    def __init__(self, every: Iterable[Observer] = ()) -> None:
        self.every = tuple(every)
        self.before = self._overriding("before")
        self.ready = self._overriding("ready")
        self.after = self._overriding("after")[::-1]
        self.routed = self._overriding("routed")
        self.lookouts = self._overriding("lookout")

    def _overriding(self, name: str) -> Sequence[Callable[..., Any]]:
        return [getattr(one, name) for one in self.every if _overrides(one, name)]

    @property
    def by_node(self) -> bool:
        """Whether any of them asks for every node."""
        told = "before", "ready", "after", "routed", "lookout"
        return any(one.by_node and any(_overrides(one, name) for name in told) for one in self.every)

    @property
    def keep_order(self) -> bool:
        """Whether any of them does."""
        return any(one.keeps_order for one in self.every)

    def begin(self, times: Times) -> None:
        """Tell all of them that a step begins."""
        for one in self.every:
            one.begin(times)

    def end(self, *, failed: bool) -> None:
        """Tell all of them that the step has ended."""
        for one in reversed(self.every):
            one.end(failed=failed)


def _overrides(one: Observer, name: str) -> bool:
    return getattr(type(one), name) is not getattr(Observer, name)


class Contexts(Observer):
    """Enters a context around every compute node: a base for observers that have one."""

    def __init__(self) -> None:
        self._entered = ExitStack()

    def around(self, node: Node, inside: ExitStack) -> None:
        """Enter what a compute node is to run in."""

    def ready(self, node: Node, received: Mapping[Place, Any]) -> None:
        """Enter the context of a compute node."""
        if node.resource is Resource.COMPUTE:
            self.around(node, self._entered)

    def after(self, node: Node) -> None:
        """Leave it."""
        self._entered.close()

    def end(self, *, failed: bool) -> None:
        """Leave the context of a node that has failed."""
        self._entered.close()


class WithoutAutocast(Contexts):
    """Autocast around a step is for its forwards alone: a backward has the dtypes of its forward already."""

    by_node = False

    def __init__(self, kinds: Sequence[str]) -> None:
        super().__init__()
        self._kinds = kinds

    @staticmethod
    def here() -> list[Observer]:
        """Return one for the kinds of devices that have autocast on now, or none."""
        kinds = [kind for kind in ("cpu", *devices.KINDS) if torch.is_autocast_enabled(kind)]
        return [WithoutAutocast(kinds)] if kinds else []

    def around(self, node: Node, inside: ExitStack) -> None:
        if node.kind is not Kind.F and node.op not in RECOMPUTES:
            for kind in self._kinds:
                inside.enter_context(torch.autocast(kind, enabled=False))
