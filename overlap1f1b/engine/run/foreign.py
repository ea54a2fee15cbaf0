"""Exchanges that blocks make by themselves, without our Experts: found in the first step, hidden in all later ones.

Three kinds are found: calls of the public ``exchange``; torch's functional ``all_to_all_single``, by whatever name it
is called; and an ``autograd.Function`` that turns out to be an all-to-all and no more, such as Megatron-Core's, torch's
own in ``torch.distributed.nn``, or a user's. The first step runs them where they stand, and notes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverloadPacket

from overlap1f1b.plan import Op
from overlap1f1b.transport.calls import Splits


class Seen(NamedTuple):
    """An exchange of one microbatch in the first step.

    Args:
        send: Rows to each rank.
        receive: Rows from each rank.
        rows: ``[0, …]``, like each of its tensors.
    """

    send: list[int]
    receive: list[int]
    rows: tuple[Tensor, ...]


class ForeignExchange(NamedTuple):
    """An exchange of a block, the same for all microbatches.

    Args:
        op: ``COMBINE`` if its sizes are those of an earlier exchange, swapped; else ``DISPATCH``.
        back_of: Position of that exchange; -1 for a dispatch.
        rows: ``[0, …]``, like each of its tensors.
    """

    op: Op
    back_of: int
    rows: tuple[Tensor, ...]

    @property
    def text(self) -> str:
        """Sub-op, and dtype and size of a row; the same on all ranks."""
        rows = ", ".join(f"{str(like.dtype)[6:]}{list(like.shape[1:])}" for like in self.rows)
        return f"{self.op} of {rows}"


class Foreign:
    """The exchanges that the blocks of a stage make by themselves.

    Attributes:
        ranks: Global numbers of the ranks that share the experts.
        functions: Functions of the model that are an all-to-all.
        seen: Exchanges of the step, by block and microbatch; None if nobody looks for them.
        hidden: Exchanges that are hidden, by block.
    """

    def __init__(self) -> None:
        self.ranks: Sequence[int] = ()
        self.functions: dict[type, Arguments] = {}
        self.seen: dict[int, dict[int, list[Seen]]] | None = None
        self.hidden: dict[int, tuple[ForeignExchange, ...]] = {}

    def adopt(self, names: Sequence[str]) -> None:
        """Hide from now on what the step has shown.

        Raises:
            ValueError: Microbatches have made different exchanges; ``names`` are the blocks'.
        """
        seen, self.seen = self.seen or {}, None
        for block, by_microbatch in seen.items():
            if any(by_microbatch.values()):
                self.hidden[block] = matched([by_microbatch[m] for m in sorted(by_microbatch)], names[block])


def matched(microbatches: Sequence[Sequence[Seen]], name: str) -> tuple[ForeignExchange, ...]:
    """Return the exchanges of a block from those of its microbatches.

    Raises:
        ValueError: Microbatches have exchanges of other numbers or dtypes; ``name`` is the block's.
    """
    first, found = microbatches[0], list[ForeignExchange]()
    kinds = [[[(like.dtype, like.shape[1:]) for like in seen.rows] for seen in every] for every in microbatches]
    if any(kind != kinds[0] for kind in kinds):
        numbers = sorted({len(every) for every in microbatches})
        raise ValueError(
            f"{name} exchanges rows {' or '.join(map(str, numbers))} times, of sizes that differ between microbatches; "
            "allowed: the same exchanges in each microbatch"
        )
    open_: list[int] = []
    for position, seen in enumerate(first):
        back = next(
            (
                earlier
                for earlier in reversed(open_)
                if all(every[position].send == every[earlier].receive for every in microbatches)
                and all(every[position].receive == every[earlier].send for every in microbatches)
            ),
            -1,
        )
        if back < 0:
            open_.append(position)
        else:
            open_.remove(back)
        found.append(ForeignExchange(Op.DISPATCH if back < 0 else Op.COMBINE, back, seen.rows))
    return tuple(found)


class Arguments(NamedTuple):
    """Positions of an all-to-all's arguments among those of an ``autograd.Function``; None for an argument it lacks.

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
        group = dist.group.WORLD if self.group is None or args[self.group] is None else args[self.group]
        assert isinstance(group, dist.ProcessGroup)
        send, receive = (None if at is None else args[at] for at in (self.send, self.receive))
        return args[self.tensor], send, receive, group


Watched = tuple[Tensor, Tensor, Any, Any, Any]
"""Output, input, sizes to receive, sizes to send, and group of a call of ``all_to_all_single``."""


def watched(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> Watched:
    """Return the arguments of a call of ``all_to_all_single``."""
    return output, input, output_split_sizes, input_split_sizes, group


def all_to_all_of(args: Sequence[Any], calls: Sequence[Watched], result: Any) -> Arguments | None:
    """Return how an ``autograd.Function`` says what it exchanges; None if it is more than an all-to-all.

    Args:
        args: Its arguments.
        calls: Calls of ``all_to_all_single`` in its forward.
        result: Its result.
    """
    if len(calls) != 1 or not isinstance(result, Tensor):
        return None
    output, sent, receive, send, group = calls[0]
    if not _same(output, result):
        return None
    if (send is None or receive is None) and any(argument is None for argument in args):
        return None  # another call may give sizes in its place
    positions: list[int | None] = []
    for value, is_it in ((sent, _same), (send, _is), (receive, _is), (group, _is)):
        at = next((i for i, argument in enumerate(args) if is_it(value, argument)), None)
        if at is None and value is not None:
            return None
        positions.append(None if value is None else at)
    tensor, to, origin, ranks = positions
    given = next((i for i, argument in enumerate(args) if _same(output, argument)), None)
    return None if tensor is None else Arguments(tensor, to, origin, ranks, given)


def _is(value: Any, argument: Any) -> bool:
    return argument is value


def _same(tensor: Any, argument: Any) -> bool:
    """Return whether two tensors are the same values: a Function may see another object, or a contiguous copy."""
    return (
        isinstance(tensor, Tensor)
        and isinstance(argument, Tensor)
        and tensor.shape == argument.shape
        and tensor.dtype == argument.dtype
        and (
            tensor.data_ptr() == argument.data_ptr() or (not argument.is_contiguous() and torch.equal(tensor, argument))
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
