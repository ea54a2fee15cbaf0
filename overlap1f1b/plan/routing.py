"""What a routing exchanges: how often a token is sent, and in how many bytes."""

import random
from functools import cache
from math import comb

DRAWN = 2048
"""Tokens that are drawn where experts are chosen within groups."""


@cache
def rows_per_token(experts: int, chosen: int, ranks: int, groups: int = 1, top_groups: int = 1) -> float:
    """Return the expected number of ranks to which a token is sent, itself included, with all experts equally likely.

    >>> round(rows_per_token(128, 8, 8) / 8, 2)  # of the rows that a row for each choice would be
    0.67

    A rank has none of the chosen experts with probability C(E − E/ranks, K) / C(E, K). Within groups there is no such
    formula, since a group is taken for its best experts: tokens are drawn, always the same.

    Args:
        experts: E.
        chosen: K.
        ranks: Divides E.
        groups: Divides E.
        top_groups: Groups that a token may use, those whose two best experts have the largest sum.

    Raises:
        ValueError: Experts cannot be divided, or a token cannot choose so many.
    """
    for name, parts in (("ranks", ranks), ("groups", groups)):
        if parts < 1 or experts % parts:
            raise ValueError(f"{name}={parts} for {experts} experts; allowed: a divisor of {experts}")
    if not 1 <= top_groups <= groups:
        raise ValueError(f"top_groups={top_groups} of {groups} groups; allowed: 1 to {groups}")
    size, local = experts // groups, experts // ranks
    if not 0 <= chosen <= top_groups * size:
        raise ValueError(f"chosen={chosen} of {top_groups * size} experts; allowed: 0 to {top_groups * size}")
    if top_groups == groups:
        return ranks * (1 - comb(experts - local, chosen) / comb(experts, chosen))
    drawing, rows = random.Random(0), 0
    for _ in range(DRAWN):
        scores = [drawing.random() for _ in range(experts)]
        best = [sum(sorted(scores[at : at + size])[-2:]) for at in range(0, experts, size)]
        kept = sorted(range(groups), key=best.__getitem__)[-top_groups:]
        allowed = [expert for group in kept for expert in range(group * size, (group + 1) * size)]
        rows += len({expert // local for expert in sorted(allowed, key=scores.__getitem__)[-chosen:]})
    return rows / DRAWN


def row_bytes(hidden: int, chosen: int, itemsize: int, weight_itemsize: int, precision: str | None = None) -> int:
    """Return the bytes of a sent row: H elements, K numbers of experts and K weights, a multiple of 16.

    Args:
        hidden: H.
        chosen: K.
        itemsize: Bytes of an element.
        weight_itemsize: Bytes of a weight.
        precision: ``"fp8"`` for elements in eight bits and four bytes of a scale, ``"mxfp8"`` for a byte of 32
            elements' scale; None for elements as they are.

    Raises:
        ValueError: The precision is unknown.
    """
    scales = {"fp8": 4, "mxfp8": 2 * -(-hidden // 64)}
    if precision not in (None, *scales):
        raise ValueError(f"precision={precision!r}; allowed: None, {', '.join(map(repr, scales))}")
    row = hidden * itemsize if precision is None else hidden + scales[precision]
    return -(-(row + chosen * (2 + weight_itemsize)) // 16) * 16


def exchanged_bytes(
    tokens: int,
    hidden: int,
    experts: int,
    chosen: int,
    ranks: int,
    groups: int = 1,
    top_groups: int = 1,
    *,
    itemsize: int = 2,
    weight_itemsize: int = 2,
    precision: str | None = None,
) -> tuple[float, float]:
    """Return the expected bytes that a rank sends to others for its tokens: in a dispatch and in a combine.

    The backward sends the same. ``precision`` is of the dispatch alone, see :func:`row_bytes`. Under a row for each
    choice both would be ``T·K·H·itemsize·(1 − 1/ranks)``.
    """
    rows = tokens * rows_per_token(experts, chosen, ranks, groups, top_groups) * (1 - 1 / ranks)
    return rows * row_bytes(hidden, chosen, itemsize, weight_itemsize, precision), rows * hidden * itemsize
