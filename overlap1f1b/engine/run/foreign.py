"""Exchanges that blocks make by themselves, without our Experts: found in the first step, hidden in all later ones.

Three kinds are found: calls of the public ``exchange``; torch's functional ``all_to_all_single``, by whatever name it
is called; and an ``autograd.Function`` that turns out to be an all-to-all and no more, such as Megatron-Core's, torch's
own in ``torch.distributed.nn``, or a user's. The first step runs them where they stand, and notes them. Functions are
then tried with random rows: one that does more than an all-to-all, on any rank, stays where it stands.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import reduce
from numbers import Integral
from operator import and_
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverloadPacket

from overlap1f1b.plan import Op
from overlap1f1b.transport.calls import Splits, splits_of
from overlap1f1b.transport.exchange import build_exchange
from overlap1f1b.transport.mesh import Mesh

Kinds = tuple[tuple[torch.dtype, torch.Size], ...]


def kinds_of(tensors: Sequence[Tensor]) -> Kinds:
    """Return the dtype of each tensor, and the shape of a row."""
    return tuple([(tensor.dtype, tensor.shape[1:]) for tensor in tensors])


class Seen(NamedTuple):
    """An exchange of one microbatch in the first step.

    Args:
        send: Rows to each rank.
        receive: Rows from each rank.
        kinds: Dtype of each of its tensors, and shape of a row.
        call: The call of a Function that made it; None if no Function did.
    """

    send: list[int]
    receive: list[int]
    kinds: Kinds
    call: Call | None = None


class ForeignExchange(NamedTuple):
    """An exchange of a block, the same for all microbatches.

    Args:
        op: ``COMBINE`` if its sizes are the swapped sizes of an earlier exchange; else ``DISPATCH``.
        back_of: Position of that exchange; -1 for a dispatch.
        rows: ``[0, …]``, like each of its tensors.
    """

    op: Op
    back_of: int
    rows: tuple[Tensor, ...]


class Shown(NamedTuple):
    """Observed exchanges of a block, the same in all microbatches so far.

    Args:
        kinds: Tensors of all exchanges of a microbatch.
        swapped: Pairs of exchanges, a later and an earlier one, whose sizes were the same, swapped, every time.
    """

    kinds: frozenset[tuple[Kinds, ...]]
    swapped: frozenset[tuple[int, int]]

    @classmethod
    def by(cls, every: Sequence[Seen]) -> Shown:
        """Return what one microbatch has shown."""
        swapped = [
            (later, earlier)
            for later, one in enumerate(every)
            for earlier, other in enumerate(every[:later])
            if (one.send, one.receive) == (other.receive, other.send)
        ]
        return cls(frozenset([tuple([one.kinds for one in every])]), frozenset(swapped))

    def __and__(self, other: Shown) -> Shown:
        """Return what two microbatches have shown, or two ranks."""
        return Shown(self.kinds | other.kinds, self.swapped & other.swapped)


class Foreign:
    """The exchanges that the blocks of a stage make by themselves.

    Attributes:
        ranks: Global numbers of the ranks that share the experts.
        functions: Functions of the model that are an all-to-all.
        tried: Functions of the step, by their text.
        seen: Exchanges of the step, by block and microbatch; None if nobody looks for them.
        hidden: Exchanges that are hidden, by block.
    """

    def __init__(self) -> None:
        self.ranks: Sequence[int] = ()
        self.functions: dict[Form, Known] = {}
        self.tried: dict[str, Trial] = {}
        self.seen: dict[int, dict[int, list[Seen]]] | None = None
        self.hidden: dict[int, tuple[ForeignExchange, ...]] = {}

    def look(
        self, function: type, args: Sequence[Any], calls: Sequence[Watched], result: Any, turn: Turn
    ) -> Call | None:
        """Note a call of a Function; return it if it may be hidden.

        Args:
            function: The Function.
            args: Its arguments.
            calls: Calls of ``all_to_all_single`` and ``all_to_all`` in its forward.
            result: Its result.
            turn: When it was called.
        """
        results = result if isinstance(result, tuple) else (result,)
        exchanges = self.number_of(calls)
        if len(calls) == 1 and not (exchanges and any(map(_differs, results))):
            return None
        form = form_of(function, args)
        trial = self.tried.setdefault(text_of(form), Trial(form))
        trial.exchanges |= exchanges > 0
        places = places_of(args, calls[0], result) if len(calls) == 1 else ()
        told = frozenset[int | None]().union(*places)
        texts = {at: texts_of(arg, calls[0].splits) for at, arg in enumerate(args) if at not in told} if places else {}
        if not places or not all(texts.values()) or trial.form != form:  # another Function may have the same name
            trial.places = ()
            return None
        trial.places = places if trial.places is None else trial.places and _common(trial.places, places)
        # Without values of tensors, which would be kept to the step's end.
        trial.calls[turn] = texts, [_empty(a) if isinstance(a, Tensor) else a for a in args]
        return Call(form, texts)

    def number_of(self, calls: Sequence[Watched]) -> int:
        """Return how many calls exchange over the ranks that share the experts."""
        return sum(list(self.ranks) == dist.get_process_group_ranks(call.group) for call in calls)

    def _hides(self, call: Call) -> bool:
        known = self.functions.get(call.form)
        return known is not None and bool(known.verdict(call.texts))

    def shown(self) -> dict[int, Shown]:
        """Return what this rank's microbatches have shown of each block."""
        seen, self.seen = self.seen or {}, None
        return {
            block: reduce(
                and_,
                [
                    Shown.by([one for one in every if one.call is None or self._hides(one.call)])
                    for every in by_microbatch.values()
                ],
            )
            for block, by_microbatch in seen.items()
            if by_microbatch
        }


def shown_by_all(stages: Mapping[int, Foreign], mesh: Mesh) -> dict[tuple[int, int], Shown]:
    """Return what the microbatches of all ranks have shown, by (stage, block). All ranks must call this.

    Sizes that are symmetric by chance, on one rank, tell nothing.
    """
    mine = {(number, block): shown for number, one in stages.items() for block, shown in one.shown().items()}
    return mesh.combined(
        mine,
        lambda _, parts: {
            place: reduce(and_, [part[place] for part in parts if place in part]) for place in set().union(*parts)
        },
    )


def matched(shown: Shown, name: str, device: torch.device) -> tuple[ForeignExchange, ...]:
    """Return the exchanges of a block.

    Raises:
        ValueError: Microbatches have exchanges of other numbers or dtypes; ``name`` is the block's.
    """
    if len(shown.kinds) > 1:
        numbers = sorted({len(every) for every in shown.kinds})
        raise ValueError(
            f"{name} exchanges rows {' or '.join(map(str, numbers))} times, of sizes that differ between microbatches; "
            "allowed: the same exchanges in each microbatch, on all ranks"
        )
    (every,) = shown.kinds
    found, open_ = list[ForeignExchange](), list[int]()
    for position, kinds in enumerate(every):
        back = next((earlier for earlier in reversed(open_) if (position, earlier) in shown.swapped), -1)
        if back < 0:
            open_.append(position)
        else:
            open_.remove(back)
        rows = tuple([torch.empty(0, *shape, dtype=dtype, device=device) for dtype, shape in kinds])
        found.append(ForeignExchange(Op.DISPATCH if back < 0 else Op.COMBINE, back, rows))
    return tuple(found)


class Arguments(NamedTuple):
    """Positions of an all-to-all's arguments in a call of an ``autograd.Function``; None for an argument it lacks.

    Args:
        tensor: Sent tensor.
        send: Rows to each rank.
        receive: Rows from each rank.
        group: Ranks of the exchange.
        output: Tensor that the Function fills and returns, if the caller gives it.
    """

    tensor: int
    send: int | None
    receive: int | None
    group: int | None
    output: int | None

    def of(self, args: Sequence[Any]) -> tuple[Tensor, Any, Any, dist.ProcessGroup]:
        """Return tensor, sizes to send, sizes to receive, and group of a call."""
        send, receive, group = (None if at is None else args[at] for at in (self.send, self.receive, self.group))
        return args[self.tensor], _given(send), _given(receive), _or_world(group)


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


class Known(NamedTuple):
    """A form of a Function that is an all-to-all, at least in some of its calls.

    Args:
        at: Positions of the all-to-all's arguments.
        fixed: Texts of each other argument, one of which every call has.
        varied: Positions of arguments that differ between calls.
        tried: Whether it is an all-to-all, by the values of these.
    """

    at: Arguments
    fixed: Mapping[int, frozenset[str]]
    varied: tuple[int, ...]
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
        if any(position not in texts for texts in calls for position in rest):
            return None
        common = {p: frozenset(calls[0][p]).intersection(*[texts[p] for texts in calls]) for p in rest}
        found = cls(
            at, {p: texts for p, texts in common.items() if texts}, tuple([p for p in rest if not common[p]]), {}
        )
        by_rank = [{turn: found.values(texts) for turn, texts in every.items()} for _, every in shown]
        return found if all(values == by_rank[0] for values in by_rank) else None

    def values(self, texts: Texts) -> tuple[str, ...]:
        """Return the values of the arguments that differ between calls; empty for one that may hide anything."""
        return tuple([texts[position][0] if texts[position] else "" for position in self.varied])

    def verdict(self, texts: Texts) -> bool | None:
        """Return whether a call is an all-to-all; None if the first step had no such call."""
        if any(known.isdisjoint(texts[position]) for position, known in self.fixed.items()):
            return None
        return self.tried.get(self.values(texts))

    def hides(self, function: type, args: Sequence[Any], splits: Splits) -> bool:
        """Return whether a call is an all-to-all.

        Raises:
            ValueError: The first step had no such call, so that nobody has tried it.
        """
        if not self.fixed and not self.varied:
            return self.tried[()]
        texts = {position: texts_of(args[position], splits) for position in (*self.fixed, *self.varied)}
        verdict = self.verdict(texts)
        if verdict is None:
            given = [", ".join(found[:1]) or type(args[position]).__name__ for position, found in sorted(texts.items())]
            raise ValueError(
                f"{function.__module__}.{function.__qualname__} is called with {', '.join(given)} besides rows, sizes "
                "and group, and no such call was in the first step; allowed: values of the first step, or numbers of "
                "the rows that it sends or receives"
            )
        return verdict


Places = tuple[frozenset[int | None], ...]
"""Where each field of :class:`Arguments` may stand among a Function's arguments; nowhere if it is no all-to-all."""


class Trial:
    """Observed calls of one form of a Function, in the first step.

    Args:
        form: The form.

    Attributes:
        calls: Texts and arguments of each call; tensors without values.
        places: Where its arguments stand; None before a call has shown it.
        exchanges: Whether it has exchanged over the ranks that share the experts.
    """

    def __init__(self, form: Form) -> None:
        self.form = form
        self.calls: dict[Turn, tuple[Texts, list[Any]]] = {}
        self.places: Places | None = None
        self.exchanges = False


class Watched(NamedTuple):
    """A call of ``all_to_all_single``, or of ``all_to_all`` with a tensor for each rank.

    Args:
        output: Received rows; of ``all_to_all`` in parts, which are filled by the call.
        input: Sent rows.
        receive: Rows from each rank.
        send: Rows to each rank.
        group: Ranks of the exchange.
    """

    output: Tensor | Sequence[Tensor]
    input: Tensor
    receive: Any
    send: Any
    group: dist.ProcessGroup

    @property
    def in_parts(self) -> bool:
        """Whether rows travelled as a tensor for each rank: a Function then sees other tensors of the same values."""
        return not isinstance(self.output, Tensor)

    @property
    def received(self) -> Tensor:
        """Received rows, after the call."""
        return self.output if isinstance(self.output, Tensor) else torch.cat(list(self.output))

    @property
    def splits(self) -> Splits:
        """Its sizes."""
        return splits_of(len(self.input), _given(self.send), _given(self.receive), self.group.size())


def _given(sizes: Any) -> Any:
    """Return sizes; None for equal parts, which torch is told by an empty list, too."""
    return None if sizes is None or not len(sizes) else sizes


def watched(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> Watched:
    """Return a call of ``all_to_all_single``."""
    return Watched(output, input, output_split_sizes, input_split_sizes, _or_world(group))


def watched_parts(output: Any, input: Any, group: Any = None, async_op: bool = False) -> Watched | None:
    """Return a call of ``all_to_all``; None if its tensors are not parts of one."""
    output, input = list(output), list(input)
    kinds = {(tensor.dtype, tensor.shape[1:]) for tensor in (*output, *input) if tensor.dim()}
    if len(kinds) != 1 or not all(tensor.dim() for tensor in (*output, *input)):
        return None
    return Watched(output, torch.cat(input), [len(t) for t in output], [len(t) for t in input], _or_world(group))


def _or_world(group: Any) -> dist.ProcessGroup:
    group = dist.group.WORLD if group is None else group
    assert isinstance(group, dist.ProcessGroup)
    return group


def places_of(args: Sequence[Any], call: Watched, result: Any) -> Places:
    """Return where a Function is told what it exchanges; nothing if it shows that it is more than an all-to-all."""
    differs = [at for at, argument in enumerate(args) if _differs(argument)]
    output, parts = call.received, call.in_parts
    if len(differs) != 1 or not _same(call.input, args[differs[0]], parts) or not _same(output, result, parts):
        return ()
    send, receive, group = (
        frozenset([at for at, argument in enumerate(args) if argument is value or (parts and _equal(argument, value))])
        for value in (call.send, call.receive, call.group)
    )
    filled = frozenset([at for at, argument in enumerate(args) if at not in differs and _same(output, argument)])
    return (
        frozenset(differs),
        _NOWHERE if call.send is None else send,
        _NOWHERE if call.receive is None else receive,
        group or (_NOWHERE if call.group is dist.group.WORLD else group),
        filled if filled and len(output) else filled | _NOWHERE,  # tensors without rows look all the same
    )


_NOWHERE: frozenset[int | None] = frozenset({None})


def _common(one: Places, other: Places) -> Places:
    return tuple(a & b for a, b in zip(one, other, strict=True))


def _told(places: Places | None) -> Arguments | None:
    """Return the arguments if their places are known; None else: which of two equal sizes is which, nobody can tell."""
    if not places or any(len(at) != 1 for at in places):
        return None
    return Arguments(*[next(iter(at)) for at in places])  # type: ignore[arg-type] # a tensor has a place


def find_functions(stages: Mapping[int, Foreign], mesh: Mesh) -> None:
    """Try the Functions that may be an all-to-all, and tell the stages which ones are, on all ranks.

    All ranks must call this. A Function is tried on all ranks that share the experts, with calls of the same turns,
    whose sizes fit, or on none of them.
    """
    mine = {(number, text): trial for number, foreign in stages.items() for text, trial in foreign.tried.items()}
    every = mesh.gathered_by_experts(
        {
            place: (trial.places or (), {turn: texts for turn, (texts, _) in trial.calls.items()})
            for place, trial in mine.items()
        }
    )
    found: dict[tuple[int, str], Known | None] = {}
    for place in sorted(set().union(*every)):
        on_all = all(place in shown for shown in every)
        found[place] = known = Known.of(mine[place].form, [shown[place] for shown in every]) if on_all else None
        if known is not None:
            for _, (texts, args) in sorted(mine[place].calls.items()):
                values = known.values(texts)
                if values not in known.tried:
                    known.tried[values] = _exchanges_alone(mine[place].form[0], args, known.at)
    verdicts = mesh.combined(
        {place: {} if known is None else known.tried for place, known in found.items()},
        lambda _, parts: {at: _of_all([part[at] for part in parts if at in part]) for at in set().union(*parts)},
    )
    for place, trial in mine.items():
        (number, text), known, tried = place, found[place], verdicts[place]
        if known is not None and any(tried.values()):
            stages[number].functions[trial.form] = known._replace(tried=tried)
        standing = sorted(values for values, alone in tried.items() if not alone)
        if trial.exchanges and (standing or not tried):
            warnings.warn(
                f"{text}{_besides(standing)} exchanges rows where it stands, and is not hidden; allowed: one "
                "all_to_all_single and no more, forward and backward, whose sizes are given as arguments, two for both "
                "ways, and besides these no tensors or objects, and in each call the same values on all ranks",
                stacklevel=2,
            )
    for foreign in stages.values():
        foreign.tried.clear()


def _of_all(tables: Sequence[Mapping[tuple[str, ...], bool]]) -> dict[tuple[str, ...], bool]:
    """Return the verdicts that hold on all ranks; none if a form is no all-to-all on some rank."""
    every = set().union(*tables) if all(tables) else set[tuple[str, ...]]()
    return {values: all(table.get(values, True) for table in tables) for values in every}


def _besides(standing: Sequence[tuple[str, ...]]) -> str:
    return f" with {', '.join(standing[0])}" if standing and standing[0] else ""


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
    if at.output is not None:
        args[at.output] = rows.new_empty(sum(splits.receive), *rows.shape[1:])
    with torch.enable_grad():
        args[at.tensor] = sent.clone()
        result = function.apply(*args)
    grad = some(sum(splits.receive))
    (found,) = torch.autograd.grad(result, sent, grad, allow_unused=True)
    # Both exchanges are made, whatever the first one shows: the other ranks make both.
    wanted = by.rows(sent.detach(), splits.send, splits.receive).finish()
    wanted_grad = by.rows(grad, splits.receive, splits.send).finish()
    return torch.equal(result, wanted) and found is not None and torch.equal(found, wanted_grad)


def _differs(value: Any) -> bool:
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


def functional_operations() -> list[tuple[Any, OpOverloadPacket]]:
    """Return torch's functional all-to-all, each with the namespace that has it."""
    if not dist.is_available():
        return []
    namespaces = (torch.ops._c10d_functional, torch.ops._c10d_functional_autograd)
    return [(space, space.all_to_all_single) for space in namespaces if hasattr(space, "all_to_all_single")]


def group_named(group: Any) -> dist.ProcessGroup:
    """Return a process group that is given as itself or by its name."""
    if isinstance(group, str):
        known: Any = dist.distributed_c10d
        group = known._resolve_process_group(group)
    assert isinstance(group, dist.ProcessGroup)
    return group


def check_back(splits: Splits, earlier: Splits, where: str) -> None:
    """Check that rows travel back by the sizes of an earlier exchange.

    Raises:
        ValueError: They do not; ``where`` names the exchange.
    """
    if (splits.send, splits.receive) != (earlier.receive, earlier.send):
        raise ValueError(
            f"{where} sends {splits.send} and receives {splits.receive}; allowed: {earlier.receive} and "
            f"{earlier.send}, the sizes of the exchange whose rows it took back in the first step, swapped"
        )
