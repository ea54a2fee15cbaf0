"""A plan's lanes drawn as text, one line a unit of time."""

from __future__ import annotations

from collections.abc import Iterable
from textwrap import dedent

from overlap1f1b.plan import Resource, Span


def drawn(spans: Iterable[Span]) -> list[str]:
    """Exchange and compute lane side by side, time running down.

    ::

        combine.b0 m0  | attention.f0 m1
        dispatch.f0 m1 | experts.b0 m0
        …              | experts.w0 m0

    Names stand at their start and go on as ``…``; nodes that take no time are left out.
    """
    spans = [span for span in spans if span.end > span.start]
    first, last = round(min(span.start for span in spans)), round(max(span.end for span in spans))
    columns: dict[Resource, list[str]] = {lane: [""] * (last - first) for lane in (Resource.EXCHANGE, Resource.COMPUTE)}
    for span in spans:
        column, start = columns[span.node.resource], round(span.start) - first
        for line in range(start, round(span.end) - first):
            assert not column[line], f"two nodes at once on the {span.node.resource.value} lane"
            column[line] = "…"
        column[start] = f"{span.node.name}{span.node.block} m{span.node.microbatch}"
    width = max(map(len, columns[Resource.EXCHANGE]))
    return [f"{a:{width}} | {b}".rstrip() for a, b in zip(*columns.values(), strict=True)]


def lines(picture: str) -> list[str]:
    """The lines of an indented picture."""
    return [line.rstrip() for line in dedent(picture).split("\n") if line.strip()]
