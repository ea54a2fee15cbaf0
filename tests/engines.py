"""An engine whose options stand beside its arguments, where tests pass them on by name, and costs of nodes."""

from __future__ import annotations

from typing import Any

from overlap1f1b.engine import Engine, EngineOptions
from overlap1f1b.plan import NodeCosts
from overlap1f1b.schedule import Program
from tests.models import loss_fn

COSTS = NodeCosts.uniform(attention=3, experts=4, dispatch=5, counts=0.4, aggregate=0.2, dense=1, reduce=2, send=1)


def make(model: Any, program: Program, **given: Any) -> Engine:
    """Return an engine: what is no argument of it is one of its options; the loss is that of ``tests.models``."""
    arguments = {name: given.pop(name) for name in ("mesh", "loss_fn", "exchange") if name in given}
    return Engine(model, program, **{"loss_fn": loss_fn, **arguments}, options=EngineOptions(**given))


def said_of(error: BaseException) -> str:
    """Its message with all notes."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])
