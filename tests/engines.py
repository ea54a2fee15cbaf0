"""An engine whose options stand beside its arguments, where tests pass them on by name."""

from __future__ import annotations

from typing import Any

from overlap1f1b.engine import Engine, EngineOptions
from overlap1f1b.schedule import Program
from tests.models import loss_fn


def make(model: Any, program: Program, **given: Any) -> Engine:
    """Return an engine: what is no argument of it is one of its options; the loss is that of ``tests.models``."""
    arguments = {name: given.pop(name) for name in ("mesh", "loss_fn", "exchange") if name in given}
    return Engine(model, program, **{"loss_fn": loss_fn, **arguments}, options=EngineOptions(**given))
