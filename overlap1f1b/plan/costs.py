"""The costs of nodes."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, NamedTuple, Self

from overlap1f1b.plan.node import OF_PARAMETERS, PARTED, RECOMPUTE_OF, Node, Op
from overlap1f1b.schedule import Kind
from overlap1f1b.schedule.values import check_kind, check_number, checked, quoted

CostKey = tuple[Op, Kind, int, int, int, int]
"""Sub-op, kind, stage, block, call, part."""

Cost = float | tuple[float, ...]
"""A time, or for an exchange the times on its links."""


class Held(NamedTuple):
    """Bytes of a node.

    Args:
        kept: Held more when it has ended than before it began; negative if it frees more than it leaves.
        most: Held more at once while it runs.
        first: Held more from its first microbatch on, such as a gradient that did not exist.
    """

    kept: float = 0.0
    most: float = 0.0
    first: float = 0.0


def cost_key(node: Node) -> CostKey:
    """Return the key of a node's cost: the same for every microbatch and pipe; for a transfer its stage."""
    if node.op is Op.SEND:
        return Op.SEND, node.kind, node.stage, 0, 0, 0
    if node.op in OF_PARAMETERS:
        return node.op, node.kind, node.stage, node.block, 0, 0
    return node.op, node.kind, node.stage, node.block, node.call, node.part


@checked
@dataclass(frozen=True)
class NodeCosts:
    """Costs of nodes, in any one unit of time.

    >>> costs = NodeCosts.uniform(attention=3, experts=4, dispatch=5)
    >>> costs(Node(Op.COMBINE, Kind.I, microbatch=0, block=2))
    5.0

    Args:
        by_op: Cost of a (sub-op, kind) in every block; a missing one costs nothing.
        by_node: Costs of single (sub-op, kind, stage, block, call, part), which have precedence over ``by_op``; a
            measured step fills these. An exchange may have a cost for each link, since uneven rows load the links
            unevenly, and two exchanges may load different links. The key of a transfer between stages has the sending
            stage, block 0, call 0 and part 0.
        shared_links: Whether transfers between stages use the links of the exchanges, as with one network interface:
            then each gets half of a link while the other runs.
        launch: Time that the host needs to launch a (sub-op, kind), for a device on which a thread only queues work; a
            missing one costs nothing. On a CPU the thread computes by itself, and there are none.
        bytes: What nodes hold, by the same keys as ``by_node``; a missing one holds nothing. Empty if nobody has
            counted.

    Raises:
        ValueError: A key is malformed, a cost is negative or infinite, or exchanges have different numbers of links.
    """

    by_op: Mapping[tuple[Op, Kind], float] = field(default_factory=dict)
    by_node: Mapping[CostKey, Cost] = field(default_factory=dict)
    shared_links: bool = False
    launch: Mapping[tuple[Op, Kind], float] = field(default_factory=dict)
    bytes: Mapping[CostKey, Held] = field(default_factory=dict)

    def __post_init__(self) -> None:
        links = {len(cost) for cost in self.by_node.values() if isinstance(cost, tuple)}
        tables = ("cost", 2, self.by_op), ("cost", 6, self.by_node), ("launch cost", 2, self.launch)
        for what, length, table in tables:
            for key, cost in table.items():
                op, kind = _checked(key, length)
                for time in cost if isinstance(cost, tuple) else (cost,):
                    if not isinstance(time, Real) or isinstance(time, bool) or not 0 <= time < float("inf"):
                        raise ValueError(f"{what} of {op}.{kind} is {quoted(time)}; allowed: a finite number ≥ 0")
        for key, held in self.bytes.items():
            _checked(key, 6)
            check_kind(f"bytes of {key[0]}.{key[1]}", held, Held)
        if len(links) > 1 or links == {0}:
            raise ValueError(f"costs over {sorted(links)} links; allowed: one number of links, 1 or more")

    def __call__(self, node: Node) -> float:
        """Return the time of a node; for an exchange the time on its slowest link."""
        return max(self.links(node))

    def links(self, node: Node) -> tuple[float, ...]:
        """Return the cost on every link; for a compute node one number."""
        cost = self.by_node.get(cost_key(node))
        if cost is None:
            cost = self.by_op.get((node.op, node.kind), 0.0)
        return cost if isinstance(cost, tuple) else (cost,)

    @property
    def moves(self) -> bool:
        """Whether copies of activations to host memory take time, in every block."""
        return self.by_op.get((Op.OFFLOAD, Kind.F), 0.0) > 0

    def peak_bytes(self, ranks: Iterable[Iterable[Node]]) -> tuple[float, ...]:
        """Return the most bytes that nodes of each rank hold at once in their order, beyond those before the first."""
        return tuple(max(self.needs(nodes), default=0.0) for nodes in ranks) if self.bytes else ()

    def needs(self, nodes: Iterable[Node]) -> Iterator[float]:
        """Yield the most bytes that are held at once while each node runs, in their order, beyond those before it."""
        level, begun = 0.0, set[CostKey]()
        for node in nodes:
            kept, most, first = self.bytes.get(key := cost_key(node), _NOTHING)
            if key not in begun:
                begun.add(key)
                level += first
            yield level + most
            level += kept

    def in_parts(self, parts: int) -> Self:
        """Return the costs of nodes of calls of experts that are cut into ``parts``, without what smaller nodes cost.

        Only ``by_op`` changes: a measured step has measured the parts. Gradients of the experts' weights stay one node.
        Copies are those of two segments more than parts.
        """
        shares = dict.fromkeys(((op, kind) for op in PARTED for kind in (Kind.F, Kind.I)), float(parts))
        shares |= dict.fromkeys(((Op.OFFLOAD, Kind.F), (Op.FETCH, Kind.I)), (2 + parts) / 3)
        by_op = {key: cost / shares.get(key, 1.0) for key, cost in self.by_op.items()}
        return replace(self, by_op=by_op)

    @classmethod
    @checked
    def uniform(
        cls,
        *,
        attention: float,
        experts: float,
        dispatch: float,
        combine: float | None = None,
        counts: float = 0.0,
        aggregate: float = 0.0,
        dense: float = 0.0,
        reduce: float = 0.0,
        gather: float = 0.0,
        send: float = 0.0,
        shared_links: bool = False,
        launch: float = 0.0,
        copy: float = 0.0,
    ) -> Self:
        """Return equal costs for every block; input and weight gradients each cost as much as the forward.

        Recomputation costs as much as the forward, too. Every node costs the host ``launch``. A ``copy`` carries a
        block's activations to host memory, or back, those of its three segments one after another.
        """
        combine = dispatch if combine is None else combine
        weighted = {Op.ATTENTION: attention, Op.EXPERTS: experts, Op.DENSE: dense}
        weightless = {Op.DISPATCH: dispatch, Op.COMBINE: combine, Op.AGGREGATE: aggregate, Op.SEND: send}
        single = {Op.COUNTS: counts, Op.REDUCE: reduce, Op.GATHER: gather}
        for op, cost in (*weighted.items(), *weightless.items(), *single.items(), (Op.OFFLOAD, copy)):
            check_number(op, cost)
        check_number("launch", launch)
        table = {(op, kind): float(cost) for op, cost in weighted.items() for kind in (Kind.F, Kind.I, Kind.W)}
        table |= {(op, kind): float(cost) for op, cost in weightless.items() for kind in (Kind.F, Kind.I)}
        table |= {(RECOMPUTE_OF[op], Kind.I): float(cost) for op, cost in weighted.items()}
        table |= {(op, Kind.F if op is Op.COUNTS else Kind.W): float(cost) for op, cost in single.items()}
        table |= dict.fromkeys(((Op.OFFLOAD, Kind.F), (Op.FETCH, Kind.I)), float(copy) / 3)
        launches = {(op, kind): float(launch) for op in Op for kind in Kind} if launch else {}
        return cls(table, shared_links=shared_links, launch=launches)


_NOTHING = Held()


def _checked(key: Any, length: int) -> tuple[Op, Kind]:
    """Return op and kind of a key: of sub-ops in general (2 entries), or of one node (6); ValueError for others."""
    op, kind = key[:2] if isinstance(key, tuple) and len(key) == length else (None, None)
    if not isinstance(op, Op) or not isinstance(kind, Kind):
        names = "(Op, Kind)" if length == 2 else "(Op, Kind, stage, block, call, part)"
        raise ValueError(f"a cost of {key}; allowed: a key {names}")
    if op is Op.SEND and length == 6 and key[3:] != (0, 0, 0):
        raise ValueError(f"a cost of {key}; allowed: block, call and part 0, since a transfer belongs to its stage")
    return op, kind
