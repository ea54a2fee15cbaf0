"""Functions of users that may be an all-to-all: what their calls show, and a trial with random rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from enum import Enum
from functools import reduce
from numbers import Integral
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from overlap1f1b.engine.foreign.watched import Watched, group_named, sizes_of
from overlap1f1b.transport.calls import Splits, splits_of
from overlap1f1b.transport.exchange import build_exchange
from overlap1f1b.transport.streams import is_queued


class Landed(dist.Work):
    """The handle of an exchange whose rows have arrived; on a GPU for the stream that runs now.

    Args:
        device: Device of the rows.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._stream = torch.cuda.current_stream(device) if is_queued(device) else None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Order the current stream behind the rows, and return at once."""
        self.synchronize()
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def synchronize(self) -> None:
        """Order the current stream behind the rows: it may be a side stream of the model's own."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


class Arguments(NamedTuple):
    """Positions of an all-to-all's arguments in a call of an ``autograd.Function``; None for an argument it lacks.

    ``output`` is a tensor that the caller gives, and the Function fills and returns. ``returns`` tells whether it
    returns the received rows alone, or with None or the handle of the exchange, or the rows that a plain call of
    ``all_to_all_single`` has brought into ``output`` before: the Function is then there for the backward alone.
    """

    tensor: int
    send: int | None
    receive: int | None
    group: int | None
    output: int | None
    returns: Returns

    def of(self, args: Sequence[Any]) -> tuple[Tensor, Any, Any, dist.ProcessGroup]:
        """Return tensor, sizes to send, sizes to receive, and group of a call."""
        send, receive, group = (None if at is None else args[at] for at in (self.send, self.receive, self.group))
        return args[self.tensor], sizes_of(send), sizes_of(receive), group_named(group)

    @property
    def is_behind(self) -> bool:
        """Whether the rows travel in a plain call before the Function's."""
        return self.returns == "rows of before"

    def output_of(self, args: Sequence[Any]) -> Tensor:
        """Return the tensor that a call is given for the rows."""
        assert self.output is not None
        output: Tensor = args[self.output]
        return output

    def result(self, args: Sequence[Any], brought: Tensor) -> Any:
        """Return what the Function would, for the rows that its exchange has brought."""
        rows = brought if self.output is None or self.is_behind else self.output_of(args).copy_(brought)
        if self.returns in ("rows", "rows of before"):
            return rows
        return rows, None if self.returns == "rows, None" else Landed(rows.device)


Returns = Literal["rows", "rows, None", "rows, handle", "rows of before"]
Form = tuple[type, tuple[Any, ...]]
"""A Function, and what its arguments are: None, a flag or a number with a fraction; ``...`` for any other value.

Calls of another form may do something else with their arguments. So may calls of one form with other :data:`Texts`.
"""
Texts = Mapping[int, tuple[str, ...]]
"""Arguments of a call as :func:`texts_of`, by position, without those that say what is exchanged."""
Turn = tuple[int, int, int]
"""Block and microbatch of a call, and number of Functions' exchanges before it: exchanges of one turn have met."""
_FLAGS = (type(None), bool, float, str)


def form_of(function: type, args: Sequence[Any]) -> Form:
    """Return the form of a call."""
    return function, tuple([argument if type(argument) in _FLAGS else ... for argument in args])


def text_of(form: Form) -> str:
    """Return the name of a Function and its flags; the same on all ranks."""
    function, flags = form
    return f"{function.__module__}.{function.__qualname__}({', '.join('…' if f is ... else repr(f) for f in flags)})"


def texts_of(argument: Any, splits: Splits) -> tuple[str, ...]:
    """Return a value, the same text on all ranks, and how it follows from the sizes; nothing if it may hide anything.

    Tensors and objects of a user's own may change without a trace. Devices and groups are a rank's own.
    """
    if isinstance(argument, Integral):
        sizes = {"rows sent": sum(splits.send), "rows received": sum(splits.receive)}
        return (str(int(argument)), *[name for name, size in sizes.items() if size == argument])
    if isinstance(argument, Enum) or type(argument) in (*_FLAGS, torch.dtype):
        return (repr(argument),)
    if isinstance(argument, torch.device):
        return (argument.type,)
    if isinstance(argument, dist.ProcessGroup):
        return (f"rank {argument.rank()} of {argument.size()} in {argument.group_desc}",)
    if isinstance(argument, tuple | list):
        first, *others = [texts_of(part, splits) for part in argument] or [("",)]
        return tuple([f"({', '.join([text, *[o[0] for o in others]])})" for text in first if all(others)])
    return ()


class Call(NamedTuple):
    """A call of a Function in the first step."""

    form: Form
    texts: Texts


NOT_YET = Call((type(None), ()), {})
"""Stands for the call of a Function that has not come yet, and may never come."""


class Known(NamedTuple):
    """A form of a Function that is an all-to-all, at least in some of its calls.

    Args:
        at: Positions of the all-to-all's arguments.
        common: Texts that every call has of each other argument; none of one that differs between calls.
        tried: Whether it is an all-to-all, by the values of the arguments that differ.
    """

    at: Arguments
    common: Mapping[int, frozenset[str]]
    tried: dict[tuple[str, ...], bool]

    @classmethod
    def of(cls, form: Form, shown: Sequence[tuple[Places, Mapping[Turn, Texts]]]) -> Known | None:
        """Return what all ranks have shown of a form, not tried yet; None if it is no all-to-all.

        Nor is it one if its calls of a turn differ between ranks, or in a way that nobody can tell.
        """
        at = _told(reduce(_common, [places for places, _ in shown]) if all(places for places, _ in shown) else ())
        if at is None:
            return None
        calls = [texts for _, every in shown for texts in every.values()]
        rest = [position for position, flag in enumerate(form[1]) if flag is ... and position not in at]
        if any(position not in texts for texts in calls for position in rest) or (rest and at.is_behind):
            return None
        common = {p: frozenset(calls[0][p]).intersection(*[texts[p] for texts in calls]) for p in rest}
        found = cls(at, common, {})
        by_rank = [{turn: found.values(texts) for turn, texts in every.items()} for _, every in shown]
        return found if all(values == by_rank[0] for values in by_rank) else None

    def try_calls(self, trial: Trial) -> None:
        """Try each call that differs from the others; all ranks that share the experts must call this."""
        for _, (texts, args) in sorted(trial.calls.items()):
            values = self.values(texts)
            if values not in self.tried:
                self.tried[values] = _exchanges_alone(trial.form[0], args, self.at)

    def values(self, texts: Texts) -> tuple[str, ...]:
        """Return the values of the arguments that differ between calls; empty for one that may hide anything."""
        differing = [position for position, known in self.common.items() if not known]
        return tuple([texts[position][0] if texts[position] else "" for position in differing])

    def verdict(self, texts: Texts) -> bool | None:
        """Return whether a call is an all-to-all; None if the first step had no such call."""
        if any(known and known.isdisjoint(texts[position]) for position, known in self.common.items()):
            return None
        return self.tried.get(self.values(texts))

    def hides(self, function: type, args: Sequence[Any], splits: Splits) -> bool:
        """Return whether a call is an all-to-all.

        Raises:
            ValueError: The first step had no such call, so that nobody has tried it.
        """
        if not self.common:
            return self.tried[()]
        texts = {position: texts_of(args[position], splits) for position in self.common}
        verdict = self.verdict(texts)
        if verdict is None:
            given = [", ".join(found[:1]) or type(args[position]).__name__ for position, found in sorted(texts.items())]
            raise ValueError(
                f"{function.__module__}.{function.__qualname__} is called with {', '.join(given)} besides rows, sizes "
                "and group, and no such call was in the first step; allowed: values of the first step, or numbers of "
                "the rows that it sends or receives"
            )
        return verdict


Places = tuple[frozenset[int | None] | frozenset[Returns], ...]
"""Where each field of :class:`Arguments` may stand among a Function's arguments; nowhere if it is no all-to-all."""


class Trial:
    """Observed calls of one form of a Function, in the first step.

    Attributes:
        calls: Texts and arguments of each call; tensors without values.
        places: Where its arguments stand; None before a call has shown it.
        exchanges: Whether it has exchanged over the ranks that share the experts.
        behind: Whether rows have travelled in a plain call before it.
    """

    def __init__(self, form: Form) -> None:
        self.form = form
        self.calls: dict[Turn, tuple[Texts, list[Any]]] = {}
        self.places: Places | None = None
        self.exchanges = self.behind = False

    def note(self, form: Form, args: Sequence[Any], calls: Sequence[Watched], result: Any, turn: Turn) -> Call | None:
        """Note a call; return it if it may be an all-to-all and no more. See :meth:`.exchanges.Foreign.look`."""
        self.behind |= any(call.plain for call in calls)
        places = _places_of(args, calls[0], result) if len(calls) == 1 else ()
        told = frozenset[object]().union(*places)
        texts = {at: texts_of(arg, calls[0].splits) for at, arg in enumerate(args) if at not in told} if places else {}
        if not places or not all(texts.values()) or self.form != form:  # another Function may have the same name
            self.places = ()
            return None
        self.places = places if self.places is None else self.places and _common(self.places, places)
        # Without values of tensors, which would be kept to the step's end.
        self.calls[turn] = texts, [_empty(a) if isinstance(a, Tensor) else a for a in args]
        return Call(form, texts)


def _places_of(args: Sequence[Any], call: Watched, result: Any) -> Places:
    """Return where a Function is told what it exchanges; nothing if it shows that it is more than an all-to-all."""
    differs = [at for at, argument in enumerate(args) if needs_gradient(argument)]
    output, parts = call.received, call.in_parts
    result, returns = _returned(result)
    returns = "rows of before" if call.plain else returns
    if len(differs) != 1 or not _same(call.input, args[differs[0]], parts) or not _same(output, result, parts):
        return ()
    send, receive = (
        frozenset([at for at, argument in enumerate(args) if argument is value or (parts and _equal(argument, value))])
        for value in (call.send, call.receive)
    )
    name = call.group.group_name
    group = frozenset([at for at, a in enumerate(args) if a is call.group or (isinstance(a, str) and a == name)])
    filled = frozenset([at for at, argument in enumerate(args) if at not in differs and _same(output, argument)])
    return (
        frozenset(differs),
        _NOWHERE if call.send is None else send,
        _NOWHERE if call.receive is None else receive,
        group or (_NOWHERE if call.group is dist.group.WORLD else group),
        filled if filled and len(output) else filled | _NOWHERE,  # tensors without rows look all the same
        frozenset[Returns]([returns]),
    )


def _returned(result: Any) -> tuple[Any, Returns]:
    """Return the rows that a Function returns, and whether there is something beside them."""
    if isinstance(result, AsyncCollectiveTensor):
        return result.wait(), "rows"
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dist.Work | None):
        return result, "rows"
    return result[0], "rows, None" if result[1] is None else "rows, handle"


_NOWHERE: frozenset[int | None] = frozenset({None})


def _common(one: Places, other: Places) -> Places:
    return tuple(a & b for a, b in zip(one, other, strict=True))


def _told(places: Places | None) -> Arguments | None:
    """Return the arguments if their places are known; None else: which of two equal sizes is which, nobody can tell."""
    if not places or any(len(at) != 1 for at in places):
        return None
    return Arguments(*[next(iter(at)) for at in places])  # type: ignore[arg-type] # a tensor has a place


def _exchanges_alone(function: Any, given: Sequence[Any], at: Arguments) -> bool:
    """Return whether a Function makes of random rows, and of random gradients, what an all-to-all makes of them."""
    rows, send, receive, group = at.of(given)
    splits, by = splits_of(len(rows), send, receive, group.size()), build_exchange(group, device=rows.device.type)
    generator = torch.Generator(rows.device).manual_seed(group.rank())

    def some(count: int) -> Tensor:
        made = torch.randn(count, *rows.shape[1:], generator=generator, device=rows.device)
        return made.to(rows.dtype)

    args = list(given)
    sent = some(len(rows)).requires_grad_()
    # Both exchanges are made, whatever the Function shows: the other ranks make both.
    wanted = by.rows(sent.detach(), splits.send, splits.receive).finish()
    if at.output is not None:
        args[at.output] = wanted.clone() if at.is_behind else torch.empty_like(wanted)
    with torch.enable_grad():
        args[at.tensor] = sent.clone()
        result = function.apply(*args)
    if isinstance(result, tuple):
        result, handle = result
        if handle is not None:
            handle.wait()
    grad = some(sum(splits.receive))
    (found,) = torch.autograd.grad(result, sent, grad, allow_unused=True)
    wanted_grad = by.rows(grad, splits.receive, splits.send).finish()
    return torch.equal(result, wanted) and found is not None and torch.equal(found, wanted_grad)


def needs_gradient(value: Any) -> bool:
    """Return whether a value is a tensor that requires a gradient."""
    return isinstance(value, Tensor) and value.requires_grad


def _empty(tensor: Tensor) -> Tensor:
    return tensor.detach().new_empty(()).expand(tensor.shape)


def _equal(argument: Any, sizes: Any) -> bool:
    return isinstance(sizes, list) and isinstance(argument, list | tuple) and list(argument) == sizes


def _same(tensor: Any, argument: Any, copied: bool = False) -> bool:
    """Return whether two tensors are the same values: a Function may see another object, or a contiguous copy."""
    return (
        isinstance(tensor, Tensor)
        and isinstance(argument, Tensor)
        and tensor.shape == argument.shape
        and tensor.dtype == argument.dtype
        and (
            tensor.data_ptr() == argument.data_ptr()
            or ((copied or not argument.is_contiguous()) and torch.equal(tensor, argument))
        )
    )
