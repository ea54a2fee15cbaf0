"""An engine whose options stand beside its arguments, where tests pass them on by name."""

from __future__ import annotations

from typing import Any

from overlap1f1b.engine import Engine, EngineOptions
from overlap1f1b.schedule import Program


def make(model: Any, program: Program, **given: Any) -> Engine:
    """Return an engine: what is no argument of it is one of its options."""
    arguments = {name: given.pop(name) for name in ("mesh", "loss_fn", "exchange") if name in given}
    return Engine(model, program, **arguments, options=EngineOptions(**given))
