"""List scheduling: several consecutive actions open at once, each next node chosen by when it can start."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from overlap1f1b.plan.clock import Clock
from overlap1f1b.plan.costs import NodeCosts
from overlap1f1b.plan.node import Lane, Node, Op, StageShape, backward_chain, forward_chain, weight_node
from overlap1f1b.schedule import Action, Kind


class Policy(NamedTuple):
    """How the list scheduler chooses.

    Args:
        open_actions: k, the number of consecutive actions that are open at once.
        counts_block: Whether the issuing thread must wait for counts itself before it launches a dispatch.
        deferred: Microbatches beyond the program's live activations that may wait for weight gradients alone.
        patience: Share of a weight gradient's time that a wait must last for the gradient to be issued in it; in a
            shorter wait the gradient would hold up the node that is waited for by more than it saves.
    """

    open_actions: int
    counts_block: bool = False
    deferred: int = 1
    patience: float = 0.0


@dataclass(eq=False)
class _Open:
    """An action whose nodes are being issued."""

    action: Action
    chain: tuple[Node, ...]
    issued: int = 0

    @property
    def next(self) -> Node:
        return self.chain[self.issued]


class ListScheduler:
    """Orders the nodes of one rank's actions; the order is the result, the times are only its means.

    Of the next nodes of the open actions the one that can start first is issued, of equals that of the older action.
    A launch follows its producer at once. If the issuing thread must wait for counts, a dispatch follows when they have
    arrived, or when there is nothing else to do. Weight gradients are issued where the compute lane would otherwise
    wait, and where a forward could not open without them: at most ``peak`` microbatches are between forward and
    backward, at most ``policy.deferred`` more wait for weight gradients.

    A node can always be issued: the oldest open action needs nothing of the others, or a weight gradient makes room
    for it.
    """

    def __init__(self, actions: Iterator[Action], shape: StageShape, costs: NodeCosts, policy: Policy, peak: int):
        self.shape, self.policy, self.peak = shape, policy, peak
        self.waiting = deque(actions)
        self.open: list[_Open] = []
        self.weights: deque[Node] = deque()
        self.clock = Clock(costs, counts_block=policy.counts_block)
        self.order: list[Node] = []
        self.live: set[int] = set()  # microbatches from their first forward node to their last backward node
        self.pending: Counter[int] = Counter()  # weight gradients to come, per microbatch
        self.turn = {m: turn for turn, m in enumerate(a.microbatch for a in self.waiting if a.kind is Kind.B)}
        self.passed: Counter[tuple[Op, Kind, int, int]] = Counter()  # microbatches that have passed a backward node

    def run(self) -> list[Node]:
        """The nodes in issue order."""
        while self.open or self.waiting or self.weights:
            while self.waiting and len(self.open) < self.policy.open_actions:
                self._open(self.waiting.popleft())
            self._launch()
            chosen = min(self._candidates(), key=lambda c: self.clock.start(c.next), default=None)
            until = self.clock.start(chosen.next) if chosen else float("inf")
            if until > self.clock.now and (self._fill(until) or self._await_counts(until)):
                continue
            assert chosen is not None, "a plan always has a node that can be issued"
            self._advance(chosen)
        return self.order

    def _open(self, action: Action) -> None:
        chain = forward_chain if action.kind is Kind.F else backward_chain
        self.open.append(_Open(action, tuple(chain(action, self.shape))))

    def _issue(self, node: Node) -> None:
        self.clock.play(node)
        self.order.append(node)

    def _launch(self) -> None:
        for entry in list(self.open):
            while entry.issued < len(entry.chain) and entry.next.lane is not Lane.COMPUTE:
                if self._awaits_counts(entry.next) and self.clock.needed(entry.next) > self.clock.now:
                    break
                self._advance(entry)

    def _awaits_counts(self, node: Node) -> bool:
        return self.policy.counts_block and node.op is Op.DISPATCH and node.kind is Kind.F

    def _candidates(self) -> Iterator[_Open]:
        unfinished = {e.action.microbatch for e in self.open if e.action.kind is Kind.F}
        for entry in self.open:
            node = entry.next
            if node.lane is not Lane.COMPUTE:
                continue
            if entry.action.kind is Kind.F:
                if entry.issued or self._may_open():
                    yield entry
            elif (entry.issued or entry.action.microbatch not in unfinished) and self._in_turn(node):
                yield entry

    def _may_open(self) -> bool:
        held = self.live | self.pending.keys()
        return len(self.live) < self.peak and len(held) < self.peak + self.policy.deferred

    def _in_turn(self, node: Node) -> bool:
        """Whether the earlier microbatches have passed this node, so that sums of gradients keep their order."""
        return self.passed[node_key(node)] == self.turn[node.microbatch]

    def _advance(self, entry: _Open) -> None:
        node = entry.next
        self._issue(node)
        entry.issued += 1
        if node.kind is Kind.F and entry.issued == 1 and self.turn:
            self.live.add(node.microbatch)
        if node.kind is Kind.I:
            self._passed(node)
        if entry.issued == len(entry.chain):
            self.open.remove(entry)
            if node.kind is Kind.I:
                self.live.discard(node.microbatch)

    def _passed(self, node: Node) -> None:
        self.passed[node_key(node)] += 1
        weight = weight_node(node, self.shape)
        if weight is not None:
            self.weights.append(weight)
            self.pending[node.microbatch] += 1

    def _fill(self, until: float) -> bool:
        """Issues the oldest weight gradient, if there is one and the wait is long enough for it."""
        if not self.weights:
            return False
        wait, time = until - self.clock.now, self.clock.costs(self.weights[0])
        if wait < self.policy.patience * time:
            return False
        node = self.weights.popleft()
        self._issue(node)
        self.pending -= Counter([node.microbatch])
        return True

    def _await_counts(self, until: float) -> bool:
        """Lets the issuing thread wait for counts, if they come before any compute node can start."""
        dispatches = [entry for entry in self.open if self._awaits_counts(entry.next)]
        entry = min(dispatches, key=lambda e: self.clock.needed(e.next), default=None)
        if entry is None or self.clock.needed(entry.next) >= until:
            return False
        self._advance(entry)
        return True


def node_key(node: Node) -> tuple[Op, Kind, int, int]:
    """The node without its microbatch."""
    return node.op, node.kind, node.block, node.seam
