"""Start the exchanges of a block, and announce the receives of the next exchanges."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from overlap1f1b.plan import Node, Op
from overlap1f1b.plan.turn import Turn
from overlap1f1b.play.block import BlockRun
from overlap1f1b.play.microbatch import Microbatch
from overlap1f1b.play.segment import Sent
from overlap1f1b.schedule import Kind
from overlap1f1b.transport.calls import cut
from overlap1f1b.transport.exchange import Transfer
from overlap1f1b.transport.lanes import Post

Announcement = tuple[Node, Callable[[], Transfer[Tensor] | None]]
"""An exchange that follows, and what posts its receive."""


def post(turn: Turn, microbatch: Microbatch) -> tuple[Op, Post[Any]]:
    """Return the sub-op whose lane carries the exchange of a turn, and the function that starts it.

    A thread of the lane may call it. All exchanges by a library use the lane of COMBINE, so that they have one order.
    """
    node, tag = turn.node, turn.tag
    run = microbatch.runs[node.block]
    number, op, kind = microbatch.installed.stage.number, node.op, node.kind
    if node.microbatch != microbatch.index or node.stage != number:  # tags outlive a step's plan
        node = node._replace(microbatch=microbatch.index, stage=number)
        tag = node.tag
    if op is Op.COUNTS:
        return op, _post_counts(run, node, tag)
    exchange = microbatch.installed.exchange
    sent = run.sent[turn.place] if kind is Kind.F else run.sent.pop(turn.place)
    rows, sent.rows = sent.rows, None
    if sent.library is not None:
        return Op.COMBINE, partial(sent.library.forward if kind is Kind.F else sent.library.backward, rows)
    call = sent.call
    splits, back, counts = call.splits, call.back != (kind is Kind.I), None
    if op is Op.DISPATCH and kind is Kind.F and call.counted:
        counts = microbatch.transfers.exchanges[kind].pop((Op.COUNTS, node.call, node.part))
        if not (splits.counts_first or exchange.background):
            sent.counts, counts = counts, None
    announce = None  # how to announce the receive of the exchange that follows, if its sizes are known
    if exchange.background:
        announce = _next_of_forward(run, node, sent) if kind is Kind.F else _next_of_backward(microbatch, node)
    box = [rows]  # nothing keeps rows alive that have been sent
    del rows

    def start() -> Transfer[Tensor]:
        if counts is not None:
            splits.arrive(counts.wait(), counts.lane.failures)
            counts.note_read()
        expected = microbatch.transfers.announced.pop(node, None)
        # When the sizes are known compute has been given other work, for which the rows need not wait.
        ready = splits.ready if op is Op.DISPATCH and kind is Kind.F and splits.counts_first else None
        sizes = splits.sizes(back=back)
        transfer = exchange.rows(cut(box.pop(), sizes[0]), *sizes, tag, expected, ready)
        if announce is not None:
            microbatch.transfers.announced[announce[0]] = announce[1]()
        return transfer

    return op, start


def _post_counts(run: BlockRun, node: Node, tag: int) -> Post[Tensor]:
    microbatch, exchange = run.microbatch, run.installed.exchange
    splits = run.sent[Op.DISPATCH, node.call, node.part].call.splits

    def start() -> Transfer[Tensor]:
        counts = splits.counts_to_send
        assert counts is not None
        expected = microbatch.transfers.announced.pop(node, None)
        sizes = exchange.counts(counts, tag, expected, splits.counts_first)
        splits.depart(sizes)
        return sizes

    return start


def _next_of_forward(run: BlockRun, node: Node, sent: Sent) -> Announcement | None:
    """Return the receive that follows an exchange of a forward, if its sizes are known."""
    stage, exchange, call = run.installed.stage, run.installed.exchange, sent.call
    following = run.installed.cut.exchange_after.get((run.block, node.place))
    if following is None:  # the last exchange of the forward is the first of the backward
        like = sent.layout.like
        return _back(run, sent, like, node._replace(kind=Kind.I)) if run.microbatch.grad else None
    block, (op, number, part) = following
    node, counts = node._replace(op=op, block=block, call=number, part=part), call.splits.counts_to_send
    if call.answer is not None:  # rows went to the experts and come back next
        return _back(run, sent, call.answer, node)
    if not stage.alike or not call.back or counts is None or not run.installed.cut.shape[block].expert_calls:
        return None
    node = node._replace(op=Op.COUNTS)
    return node, lambda: exchange.expect_counts(counts, node.tag)


def _next_of_backward(microbatch: Microbatch, node: Node) -> Announcement | None:
    """Return the receive that follows an exchange of a backward, if its sizes are known."""
    before = microbatch.installed.cut.exchange_before.get((node.block, node.place))
    if before is None or (before[0] != node.block and not microbatch.installed.stage.alike):
        return None
    block, (op, call, part) = before
    run = microbatch.runs[block]
    sent = run.sent[op, call, part]
    if sent.library is not None:
        return None
    return _back(run, sent, sent.layout.like, node._replace(op=op, block=block, call=call, part=part))


def _back(run: BlockRun, sent: Sent, like: Tensor, node: Node) -> Announcement:
    """Return what expects rows by the sizes of a call, swapped; these may still have to arrive."""
    exchange, call = run.installed.exchange, sent.call
    return node, lambda: exchange.expect_rows(like, call.splits.sizes(back=not call.back)[1], node.tag)
