"""Drawing: spans stacked in rows, one letter a sub-op."""

from collections.abc import Iterable
from heapq import heappop, heappush
from typing import Protocol, TypeVar

from overlap1f1b.plan import RECOMPUTES, Node, Op, Resource
from overlap1f1b.schedule import Kind


class Timed(Protocol):
    """A span from ``start`` to ``end``."""

    @property
    def start(self) -> float: ...

    @property
    def end(self) -> float: ...


T = TypeVar("T", bound=Timed)

LETTERS = dict(zip(Op, "MANDECGRPXSVMAEOLF", strict=True))
"""The letter of each sub-op in a drawing."""

LANES = dict(zip(Resource, ("compute", "exchange", "counts", "peers", "memory"), strict=True))
"""The name of each resource in a drawing."""
_STYLES = {Resource.EXCHANGE: "exchange", Resource.CONTROL: "exchange", Resource.PEER: "peer", Resource.HOST: "peer"}


def style_of(node: Node) -> str:
    """Return the name of a node's colour: its resource, or the kind of a computation."""
    return _STYLES.get(node.resource, node.kind.value)


def text_of(node: Node, *, staged: bool) -> str:
    """Return the short name of a node.

    ``E2`` is the forward of microbatch 2 on the experts, ``e2`` its input gradient, ``ew2`` its weight gradient,
    ``er2`` its recomputation. If a rank holds several stages, the stage stands in front, and ``'`` marks the second
    pipe: ``3'E2``.
    """
    letter = LETTERS[node.op]
    text = letter if node.kind is Kind.F else letter.lower()
    place = f"{node.stage}{chr(39) * node.pipe}" if staged else ""
    what = "w" if node.kind is Kind.W else "r" if node.op in RECOMPUTES else ""
    return f"{place}{text}{what}{node.microbatch}"


def staged(nodes: Iterable[Node]) -> bool:
    """Return whether the nodes belong to several stages or pipes."""
    return len({(node.stage, node.pipe) for node in nodes}) > 1


def stacked(spans: Iterable[T]) -> list[list[T]]:
    """Stack spans in as few rows as possible; the spans of a row are in order and do not overlap.

    >>> from overlap1f1b.simulation.trace import Event
    >>> times = {"a": (0, 3), "b": (1, 2), "c": (3, 4)}
    >>> events = [Event("rank 0", "exchange", name, *at) for name, at in times.items()]
    >>> [[event.name for event in row] for row in stacked(events)]
    [['a', 'c'], ['b']]
    """
    rows: list[list[T]] = []
    busy: list[tuple[float, int]] = []  # end and number of the rows
    free: list[int] = []
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        while busy and busy[0][0] <= span.start:
            heappush(free, heappop(busy)[1])
        if not free:
            free.append(len(rows))
            rows.append([])
        row = heappop(free)
        rows[row].append(span)
        heappush(busy, (span.end, row))
    return rows
