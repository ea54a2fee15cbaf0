"""Start the exchanges of a block, and announce the receives of the next exchanges."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from overlap1f1b.plan import Op
from overlap1f1b.plan.turn import Turn
from overlap1f1b.play.block import BlockRun
from overlap1f1b.play.microbatch import Microbatch
from overlap1f1b.play.segment import Sent
from overlap1f1b.schedule import Kind
from overlap1f1b.transport.calls import Splits, cut
from overlap1f1b.transport.exchange import Exchange, Transfer
from overlap1f1b.transport.lanes import Post

Announcement = tuple[int, Callable[[], Transfer[Tensor] | None]]
"""Tag of an exchange that follows, and what posts its receive."""
Announced = dict[int, Transfer[Tensor] | None]
"""The receives that were posted ahead, by their tags."""


def post(turn: Turn, microbatch: Microbatch) -> tuple[Op, Post[Any]]:
    """Return the sub-op whose lane carries the exchange of a turn, and the function that starts it.

    A thread of the lane may call it. All exchanges by a library use the lane of COMBINE, so that they have one order.
    """
    node, tag, place = turn.node, turn.tag, turn.place
    run: BlockRun = microbatch.runs[turn.block]
    op, forward = node.op, node.kind is Kind.F
    exchange, announced = microbatch.installed.exchange, microbatch.transfers.announced
    if op is Op.COUNTS:
        return op, _post_counts(run.sent[Op.DISPATCH, node.call, node.part].call.splits, exchange, tag, announced)
    sent = run.sent[place] if forward else run.sent.pop(place)
    rows, sent.rows = sent.rows, None
    if sent.library is not None:
        return Op.COMBINE, partial(sent.library.forward if forward else sent.library.backward, rows)
    call = sent.call
    splits, back, counts, early = call.splits, call.back is forward, None, False
    if op is Op.DISPATCH and forward:
        # When the sizes are known compute has been given other work, for which the rows need not wait.
        early = splits.counts_first
        if call.counted:
            counts = microbatch.transfers.exchanges[Kind.F].pop((Op.COUNTS, node.call, node.part))
            if not (early or exchange.background):
                sent.counts, counts = counts, None
    announce = None  # how to announce the receive of the exchange that follows, if its sizes are known
    if exchange.background and turn.following is not None:
        announce = (_next_of_forward if forward else _next_of_backward)(run, turn, sent)
    box = [rows]  # nothing keeps rows alive that have been sent
    del rows

    def start() -> Transfer[Tensor]:
        """Send the rows, once their sizes are known, and announce the receive that follows."""
        if counts is not None:
            splits.arrive(counts.wait(), counts.lane.failures)
            counts.note_read()
        sizes, ready = splits.sizes(back=back), splits.ready if early else None
        transfer = exchange.rows(cut(box.pop(), sizes[0]), *sizes, tag, announced.pop(tag, None), ready)
        if announce is not None:
            announced[announce[0]] = announce[1]()
        return transfer

    return op, start


def _post_counts(splits: Splits, exchange: Exchange, tag: int, announced: Announced) -> Post[Tensor]:
    """Return what sends the counts of a dispatch."""

    def start() -> Transfer[Tensor]:
        counts = splits.counts_to_send
        assert counts is not None
        sizes = exchange.counts(counts, tag, announced.pop(tag, None), splits.counts_first)
        splits.depart(sizes)
        return sizes

    return start


def _next_of_forward(run: BlockRun, turn: Turn, sent: Sent) -> Announcement | None:
    """Return the receive that follows an exchange of a forward, if its sizes are known."""
    stage, call, following = run.installed.stage, sent.call, turn.following
    assert following is not None
    if (following.block, following.place) == (turn.block, turn.place):  # the first of the backward
        return _back(run, sent, sent.layout.like, following.tag) if run.microbatch.grad else None
    if call.answer is not None:  # rows went to the experts and come back next
        return _back(run, sent, call.answer, following.tag)
    if not stage.alike or not call.back or not run.installed.cut.shape[following.block].expert_calls:
        return None
    if (counts := call.splits.counts_to_send) is None:
        return None
    exchange = run.installed.exchange
    return following.counts, lambda: exchange.expect_counts(counts, following.counts)


def _next_of_backward(run: BlockRun, turn: Turn, _: Sent) -> Announcement | None:
    """Return the receive that follows an exchange of a backward, if its sizes are known."""
    following = turn.following
    assert following is not None
    if following.block != turn.block:
        if not run.installed.stage.alike:
            return None
        run = run.microbatch.runs[following.block]
    sent = run.sent[following.place]
    return None if sent.library is not None else _back(run, sent, sent.layout.like, following.tag)


def _back(run: BlockRun, sent: Sent, like: Tensor, tag: int) -> Announcement:
    """Return what expects rows by the sizes of a call, swapped; these may still have to arrive."""
    exchange, call = run.installed.exchange, sent.call
    return tag, lambda: exchange.expect_rows(like, call.splits.sizes(back=not call.back)[1], tag)
