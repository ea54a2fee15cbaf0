"""Sizes of the model of the commands; they need neither torch nor the parser of a command line."""

from __future__ import annotations

from typing import Any

from overlap1f1b.schedule.values import check_size


def check_sizes(sizes: Any) -> None:
    """Raise ``ValueError`` for sizes of a model, as in ``ModelOptions``, that no model can have."""
    for name in ("layers", "hidden", "heads", "experts", "top_k", "intermediate"):
        check_size(name, getattr(sizes, name))
    if sizes.hidden % (step := 2 * sizes.heads):
        raise ValueError(f"hidden={sizes.hidden} with heads={sizes.heads}; allowed: multiples of {step}")
    if sizes.top_k > sizes.experts:
        raise ValueError(f"top_k={sizes.top_k} with experts={sizes.experts}; allowed: 1 to {sizes.experts}")
    if not 0 <= sizes.dropout < 1:
        raise ValueError(f"dropout={sizes.dropout}; allowed: 0 to less than 1")
