"""Exchanges inside a forward: in plain autograd, or, under an engine, where the forward is suspended.

An exchange is an all-to-all of rows that autograd knows: its backward is the exchange with the sizes swapped. A module
calls :func:`exchange`. In a plain training loop the call sends, waits and returns. Inside an engine's step it suspends
the forward: the engine launches the exchange, computes for other microbatches, and resumes the forward with the rows.
"""

from collections.abc import Callable, Sequence
from operator import index
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from overlap1f1b.schedule.values import check_kind, quoted
from overlap1f1b.transport.exchange import Exchange, LocalExchange, Transfer, build_exchange
from overlap1f1b.transport.failures import Failures
from overlap1f1b.transport.streams import HostCopy, Mark
from overlap1f1b.transport.suspension import Forward


class Splits:
    """Rows that go to each rank and come from each rank in an exchange; the exchange back swaps them.

    Attributes:
        counts: ``[E]`` int64, to be exchanged first, because :attr:`receive` follows from them; None if sizes are
            known.
        counts_first: Whether rows wait for the counts, from which sizes follow; else the experts alone need them.
        host: Copies of the counts on their way to the host, if the exchange makes them.
        ready: End of the exchange of the counts on a stream: sizes and rows were there before it. None if none carried
            them.
    """

    def __init__(self, send: Sequence[int], receive: Sequence[int]) -> None:
        self.send, self.receive = list(send), list(receive)
        self.counts: Tensor | None = None
        self.counts_first = True
        self.host: HostCopy | None = None
        self.ready: Mark | None = None

    @property
    def counts_to_send(self) -> Tensor | None:
        """The counts as they travel: of each rank's experts, as many numbers for every rank."""
        return self.counts

    def depart(self, counts: Transfer[Tensor]) -> None:
        """Take what is known of the counts before they have arrived."""
        self.host, self.ready = counts.host, counts.mark

    def arrive(self, counts: Tensor, failures: Failures | None = None) -> None:
        """Take the received counts and set the sizes; a lane's thread may call it.

        A wait for the host's copies ends as :meth:`~overlap1f1b.transport.streams.Mark.synchronize` does.
        """
        raise NotImplementedError

    def sizes(self, *, back: bool) -> tuple[list[int], list[int]]:
        """Return rows to and from each rank, swapped if they travel ``back``."""
        return (self.receive, self.send) if back else (self.send, self.receive)


LibraryFunction = Callable[..., tuple[Any, ...]]
"""``(*tensors) → results``: an exchange by a library, differentiable from the tensors to some of the results."""


class LibrarySplits(Splits):
    """Sizes of an exchange that a library carries out: the library alone knows them."""

    def __init__(self, function: LibraryFunction) -> None:
        super().__init__([], [])
        self.function = function


class ExchangeCall(NamedTuple):
    """An exchange that a suspended forward waits for.

    The engine takes the ``tensors``, with as many rows each, out of their list: it has the only reference to our
    Experts' rows; those of :func:`exchange` stay with its caller.
    """

    tensors: list[Tensor]
    splits: Splits
    back: bool  # whether rows travel back, by the swapped sizes of an earlier call
    feeds_part: bool = False  # whether the handler of parts alone uses the received rows
    answer: Tensor | None = None  # ``[0, H]``, like the rows that the next call brings by swapped sizes, if known

    @property
    def counted(self) -> bool:
        """Whether counts are exchanged before the rows."""
        return self.splits.counts is not None and not self.back


def exchange_parts(
    sent: list[Tensor],
    splits: Sequence[Splits],
    computes: Sequence[Callable[[Tensor], Tensor]],
    exchange: Exchange,
    *,
    answer: Tensor | None = None,
) -> list[Tensor]:
    """Send rows in parts, compute on the received rows of each, and return the rows of each that came back.

    Under an engine the exchange of one part travels while another is computed; else ``exchange`` carries it. Rows ``[R,
    …]`` are taken out of the list ``sent``; the sizes of ``splits`` may still have to be exchanged. For ``answer`` see
    :class:`ExchangeCall`.
    """
    forward = Forward.running()
    if forward is None:
        return [
            _exchanged(compute(_there(sent.pop(0), of, exchange)), exchange, *of.sizes(back=True))
            for of, compute in zip(splits, computes, strict=True)
        ]
    calls = [ExchangeCall([rows], of, False, True, answer) for rows, of in zip(sent, splits, strict=True)]
    sent.clear()
    received = list(forward.suspend(calls))
    for of, compute in zip(splits, computes, strict=True):
        # Nothing keeps rows alive that have been sent.
        part = forward.handlers.part
        result = [compute(received.pop()) if part is None else part(compute, (received.pop(),))]
        received = list(forward.suspend([ExchangeCall(result, of, True)]))
    return received


def _there(rows: Tensor, splits: Splits, exchange: Exchange) -> Tensor:
    if (sent := splits.counts_to_send) is not None:
        counts = exchange.counts(sent)
        splits.depart(counts)
        splits.arrive(counts.finish())
    return _exchanged(rows, exchange, *splits.sizes(back=False))


def _exchanged(rows: Tensor, exchange: Exchange, send: list[int], receive: list[int]) -> Tensor:
    if isinstance(exchange, LocalExchange):  # may be changed in place, as a Function's result that it was given may not
        return rows
    received: Tensor = ExchangedRows.apply(rows, exchange, send, receive)
    return received


OneOrSeveral = TypeVar("OneOrSeveral", Tensor, tuple[Tensor, ...])


def exchange(
    tensors: OneOrSeveral, send: Sequence[int] | None, receive: Sequence[int] | None, group: dist.ProcessGroup | None
) -> OneOrSeveral:
    """Exchange rows between ranks, differentiably; inside an engine's step the exchange is hidden behind compute.

    >>> rows, probs = exchange((rows, probs), send, receive, group)  # one exchange: both go by the same sizes
    >>> y = exchange(experts(rows, probs), receive, send, group)  # and back

    Args:
        tensors: One tensor ``[R, …]`` or several, which travel together.
        send: Rows to each rank; None for equal parts.
        receive: Rows from each rank; None for equal parts.
        group: Ranks of the exchange; inside an engine's step the engine's ranks along "ep". None: this rank alone.

    Raises:
        ValueError: Sizes of another number than ranks, negative, or with another sum than there are rows.
    """
    every: tuple[Tensor, ...] = tuple(tensors) if isinstance(tensors, tuple | list) else (tensors,)
    if not all(isinstance(tensor, Tensor) and tensor.dim() for tensor in every) or len(set(map(len, every))) != 1:
        shapes: list[Any] = [list(part.shape) if torch.is_tensor(part) else quoted(part) for part in every]
        raise ValueError(f"tensors {', '.join(map(str, shapes))}; allowed: one or several [R, ...], of as many rows")
    check_kind("group", group, dist.ProcessGroup, None)
    splits = splits_of(len(every[0]), send, receive, 1 if group is None else group.size())
    here = 0 if group is None else group.rank()
    if splits.send[here] != splits.receive[here]:
        what = f"send={splits.send}, receive={splits.receive}: a rank's rows to itself differ"
        raise ValueError(f"{what}; allowed: the same number at position {here} of both")
    if group is None:
        return tensors
    forward = Forward.running()

    def exchanged() -> tuple[Any, ...]:
        if forward is not None and forward.handlers.hides(every, splits, group):
            return tuple(forward.suspend([ExchangeCall(list(every), splits, False)]))
        by = build_exchange(group, device=every[0].device.type)
        return tuple([ExchangedRows.apply(tensor, by, splits.send, splits.receive) for tensor in every])

    got: Any = exchanged() if forward is None else forward.handlers.bring(exchanged)
    return got[0] if isinstance(tensors, Tensor) else got


def exchange_by(function: LibraryFunction, tensors: list[Tensor], group: dist.ProcessGroup) -> tuple[Any, ...]:
    """Return what a library's exchange over a group brings; inside an engine's step it is hidden.

    A dispatch and its combine must follow each other, and all ranks of the group play one plan. The engine calls the
    function, with tensors without a history that are taken out of the list, in a lane's thread, or on a stream of the
    lane, so it must not read what changes between microbatches except by its arguments.

    ValueError if no tensor requires a gradient, and the first step's did, whose exchanges the engine hides.
    """
    forward, splits = Forward.running(), LibrarySplits(function)
    if forward is None:
        return function(*tensors)

    def exchanged() -> tuple[Any, ...]:
        if forward.handlers.hides(tensors, splits, group):
            return tuple(forward.suspend([ExchangeCall(tensors, splits, False)]))
        # A part that is computed again does not repeat what it saves.
        with saved_tensors_hooks(lambda t: t, lambda t: t):
            return function(*tensors)

    return forward.handlers.bring(exchanged)


def splits_of(rows: int, send: Sequence[int] | None, receive: Sequence[int] | None, ranks: int) -> Splits:
    """Return the sizes of an exchange of ``rows`` rows, None for equal parts; ValueError if they do not fit."""
    splits = Splits(_sizes(send, "send", rows, ranks), _sizes(receive, "receive", rows, ranks))
    if sum(splits.send) != rows:
        raise ValueError(f"send={splits.send} for {rows} rows; allowed: sizes whose sum is {rows}")
    return splits


def _sizes(value: Sequence[int] | None, name: str, rows: int, ranks: int) -> list[int]:
    """Return rows for each rank: those that are given, or equal parts."""
    if value is None:
        if rows % ranks:
            raise ValueError(f"{name}=None for {rows} rows and {ranks} ranks; allowed: a multiple, or sizes")
        return [rows // ranks] * ranks
    try:
        sizes = list(map(index, value))
    except TypeError:  # no sequence, or of something else than whole numbers
        sizes = []
    if len(sizes) != ranks or min(sizes) < 0:
        raise ValueError(f"{name}={quoted(value)}; allowed: a size of 0 or more for each of {ranks} ranks")
    return sizes


class ExchangedRows(torch.autograd.Function):
    """Exchange with an immediate wait; its backward is the exchange with the sizes swapped."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange, send: list[int], receive: list[int]) -> Tensor:
        ctx.exchange, ctx.send, ctx.receive, ctx.rows = exchange, send, receive, len(rows)
        return exchange.rows(cut(rows, send), send, receive).finish()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        grad = ctx.exchange.rows(grads[0], ctx.receive, ctx.send).finish()
        return uncut(grad, ctx.rows), None, None, None


def cut(rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the rows that sizes count: on a device a route makes room for more, since it does not know how many."""
    count = sum(sizes)
    return rows if rows.shape[0] == count else rows[:count]


def uncut(grad: Tensor, rows: int) -> Tensor:
    """Return the gradient of rows before :func:`cut`, of which nobody reads the rest."""
    if grad.shape[0] == rows:
        return grad
    whole = grad.new_zeros(rows, *grad.shape[1:])
    whole[: len(grad)] = grad
    return whole
