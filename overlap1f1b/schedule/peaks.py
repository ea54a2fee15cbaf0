"""How much a rank's order of actions keeps alive."""

from __future__ import annotations

from collections.abc import Iterable

from overlap1f1b.schedule.action import Kind, Pair, Step


def peaks_of(steps: Iterable[Step]) -> tuple[int, int]:
    """Most activations and most weight gradients that wait at once, in (stage, microbatch).

    An activation lives from its forward to the end of its B or W, a weight gradient waits between its I and its W. Of a
    pair the forward counts before the backward is done.

    >>> from overlap1f1b.schedule import Action
    >>> peaks_of([Action.parse(text) for text in "0F0 0F1 0I0 0I1 0W0 0W1".split()])
    (2, 2)
    """
    alive = most_alive = pending = most_pending = 0
    for step in steps:
        for kind in (step.forward.kind, step.backward.kind) if isinstance(step, Pair) else (step.kind,):
            if kind is Kind.F:
                alive += 1
                most_alive = max(most_alive, alive)
            elif kind is Kind.B:
                alive -= 1
            elif kind is Kind.I:
                pending += 1
                most_pending = max(most_pending, pending)
            else:
                alive, pending = alive - 1, pending - 1
    return most_alive, most_pending
