"""``autograd.Function``s that are an all-to-all and no more: which of their arguments is what.

Those of common libraries stand in a table. A user declares others by :func:`declare`. Nothing else about a Function is
guessed: the first step compares a declaration with what torch's all-to-all has really exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverloadPacket
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from overlap1f1b.transport import devices
from overlap1f1b.transport.calls import Splits, splits_of

_ATTRIBUTE = "_overlap1f1b_declared"


class Declared(NamedTuple):
    """Positions of an all-to-all's arguments in ``MyFunction.apply``, see :func:`declare`."""

    tensor: int
    send: int | None = None
    receive: int | None = None
    group: int | None = None
    output: int | None = None
    async_op: int | None = None
    backward_only: bool = False

    def given(self, name: str, args: Sequence[Any]) -> Any:
        """Return an argument of a call by its name here; None if it was not given."""
        at = getattr(self, name)
        return args[at] if at is not None and at < len(args) else None

    def of(self, args: Sequence[Any]) -> tuple[Tensor, Any, Any, dist.ProcessGroup]:
        """Return tensor, sizes to send, sizes to receive, and group of a call."""
        send, receive, group = (self.given(name, args) for name in ("send", "receive", "group"))
        return args[self.tensor], sizes_of(send), sizes_of(receive), group_named(group)

    def result(self, args: Sequence[Any], received: Tensor) -> Any:
        """Return what the Function would, for the rows that its exchange has brought."""
        output = None if self.backward_only else self.given("output", args)
        rows = received if output is None else output.copy_(received)
        if self.async_op is None:
            return rows
        return rows, Arrived(rows.device) if self.given("async_op", args) else None


KNOWN = {
    ("deepspeed.module_inject.auto_ep_layer", "_AllToAllV"): Declared(tensor=1, send=2, receive=3, group=0),
    ("deepspeed.moe.sharded_moe", "_AllToAll"): Declared(tensor=1, group=0),
    ("megablocks.layers.all_to_all", "AllToAllOp"): Declared(tensor=0, send=2, receive=1, group=3, async_op=4),
    ("megatron.core.tensor_parallel.mappings", "_AllToAll"): Declared(tensor=1, send=3, receive=2, group=0),
    ("olmo_core.ops.moe", "AllToAllOp"): Declared(tensor=0, send=2, receive=1, group=3, async_op=4),
    ("torch.distributed.nn.functional", "_AlltoAllSingle"): Declared(tensor=4, send=3, receive=2, group=0, output=1),
    ("tutel.impls.communicate", "PrimAllToAll"): Declared(tensor=0, group=1),
    ("tutel.impls.communicate", "RestoreBackward"): Declared(tensor=1, group=2, output=0, backward_only=True),
}
"""Functions of libraries, by module and name."""


def declare(
    function: type[torch.autograd.Function],
    *,
    tensor: int,
    send: int | None = None,
    receive: int | None = None,
    group: int | None = None,
    output: int | None = None,
    async_op: int | None = None,
    backward_only: bool = False,
) -> None:
    """Declare that an ``autograd.Function`` is an all-to-all and no more, so that engines hide its exchange.

    Its other arguments must not change what it exchanges. A subclass needs a declaration of its own.

    >>> declare(MyFunction, tensor=0, send=1, receive=2, group=3)  # MyFunction.apply(rows, send, receive, group)

    Args:
        function: The Function; the declaration becomes an attribute of it.
        tensor: Position of the sent rows ``[R, …]`` among the arguments of ``apply``, from 0.
        send: Position of the rows to each rank; None for equal parts. May be the same as ``receive``.
        receive: Position of the rows from each rank; None for equal parts.
        group: Position of the process group, or of its name; None for all ranks.
        output: Position of a tensor that the Function fills with the received rows, and returns.
        async_op: Position of a flag. The Function then returns a pair: rows, and the handle of its exchange, or None if
            the flag is not set.
        backward_only: Whether a plain ``torch.distributed.all_to_all_single`` before the call has filled ``output``,
            and the Function adds the backward.

    Raises:
        ValueError: Not a Function, or positions that are negative or stand for two arguments.
    """
    if not (isinstance(function, type) and issubclass(function, torch.autograd.Function)):
        raise ValueError(f"declare({function!r}); allowed: a subclass of torch.autograd.Function")
    declared = Declared(tensor, send, receive, group, output, async_op, backward_only)
    places = [tensor, *[at for at in (send, receive, group, output, async_op) if at is not None]]
    same = len(places) - len(set(places)) - (send is not None and send == receive)
    if same or not all(type(at) is int and at >= 0 for at in places) or (backward_only and output is None):
        raise ValueError(
            f"{_text(function, declared._asdict())}; allowed: positions from 0, each for one argument (send and "
            "receive may share one), and an output if backward_only"
        )
    setattr(function, _ATTRIBUTE, declared)


def declared_of(function: type) -> Declared | None:
    """Return the declaration of a Function; None if it has none."""
    own: Declared | None = vars(function).get(_ATTRIBUTE)
    return own or KNOWN.get((function.__module__, function.__qualname__))


def check(declared: Declared, function: type, args: Sequence[Any], calls: Sequence[Watched], result: Any) -> None:
    """Check a declaration against the exchange of a call in the first step, and later against its backward."""
    name = f"{function.__module__}.{function.__qualname__}"
    if len(calls) != 1:
        raise ValueError(f"{name} is declared, and makes {len(calls)} exchanges in a call; allowed: one")
    (call,), (rows, is_pair) = calls, _returned(result)
    given, found = partial(declared.given, args=args), positions(args, call, result)
    sizes = {"send": call.splits.send, "receive": call.splits.receive}
    fits = {
        "tensor": _same(call.input, given("tensor")),
        **{
            part: _are_sizes(given(part), every) and not (getattr(declared, part) is None and found.get(part))
            for part, every in sizes.items()
        },
        "group": _is_group(given("group"), call.group),
        "output": declared.output is None or _same(call.received, given("output")),
        "async_op": is_pair == (declared.async_op is not None),
        "backward_only": call.plain == declared.backward_only,
        "result": _same(call.received, rows) and not call.changed,
    }
    wrong = [part for part, is_right in fits.items() if not is_right]
    if wrong:
        raise ValueError(
            f"{name} is declared, and its call of all_to_all_single shows another {', '.join(wrong)}; allowed: "
            f"{_text(function, found)}"
        )
    if not needs_gradient(rows):
        return
    group, at = call.group, declared.tensor
    at -= sum(not isinstance(arg, Tensor) for arg in args[:at])  # a node has gradients of tensors alone

    def check_backward(grads: Sequence[Tensor | None], sent: Sequence[Tensor]) -> None:
        found, wanted = grads[at], sent[0].new_empty((sum(sizes["send"]), *sent[0].shape[1:]))
        dist.all_to_all_single(wanted, sent[0].contiguous(), sizes["send"], sizes["receive"], group=group)
        if found is None or not torch.allclose(found, wanted, rtol=0, atol=0, equal_nan=True):
            raise ValueError(
                f"{name} is declared, and its backward does more than an all-to-all; allowed: Functions that do no more"
            )

    rows.grad_fn.register_hook(check_backward)


Positions = dict[str, frozenset[Any]]
"""Values that each argument of :func:`declare` may have; one for which nothing was found is empty."""


def positions(args: Sequence[Any], call: Watched, result: Any) -> Positions:
    """Read off a call what :func:`declare` needs, without what the Function does not have."""
    _, is_pair = _returned(result)
    handle = is_pair and result[1] is not None
    found = {
        "tensor": [_same(call.input, arg) and needs_gradient(arg) for arg in args],
        "send": [arg is not None and _are_sizes(arg, call.splits.send) for arg in args],
        "receive": [arg is not None and _are_sizes(arg, call.splits.receive) for arg in args],
        "group": [arg is not None and _is_group(arg, call.group) for arg in args],
        "output": [_same(call.received, arg) and not needs_gradient(arg) for arg in args],
        "async_op": [arg is handle for arg in args] if is_pair else [],
    }
    in_sizes, in_group = call.send is not None, call.group is not dist.group.WORLD
    needed = {"tensor": True, "send": in_sizes, "receive": in_sizes, "group": in_group, "async_op": is_pair}
    places = {
        name: frozenset([at for at, fits in enumerate(every) if fits])
        for name, every in found.items()
        if any(every) or needed.get(name)
    }
    return places | ({"backward_only": frozenset([True])} if call.plain else {})


def warning_of(function: type, found: Positions | None) -> str:
    """Return what to tell of a Function that nobody has declared; ``found`` is None if it makes several exchanges."""
    name = f"{function.__module__}.{function.__qualname__} exchanges rows where it stands, and is not hidden"
    if found is None:
        return f"{name}; allowed: Functions with one all_to_all_single, overlap1f1b.exchange"
    return f"{name}; allowed, if it is an all-to-all and no more: {_text(function, found)}"


def _text(function: type, positions: dict[str, Any]) -> str:
    """Return a call of :func:`declare` as text; with ``?`` for what is not one position."""
    given = []
    for name, value in positions.items():
        if isinstance(value, frozenset):
            given.append(f"{name}={next(iter(value)) if len(value) == 1 else '?'}")
        elif value is not None and value is not False:
            given.append(f"{name}={value}")
    return f"overlap1f1b.declare({', '.join([function.__qualname__, *given])})"


class Watched(NamedTuple):
    """A call of ``all_to_all_single``, also the functional one, or of ``all_to_all`` with a list of tensors to fill.

    ``later`` tells whether it returns a handle to wait for, ``plain`` whether it stands outside of any Function, and
    ``version`` how often its output had been changed in place right after it.
    """

    output: Tensor | Sequence[Tensor]
    input: Tensor
    receive: Any
    send: Any
    group: dist.ProcessGroup
    later: bool = False
    plain: bool = False
    version: int = 0

    @classmethod
    def of(
        cls,
        output: Any,
        input: Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Watched:
        """Return a call of ``all_to_all_single`` that was made just now."""
        group, version = group_named(group), version_of(output)
        return cls(output, input, output_split_sizes, input_split_sizes, group, async_op, version=version)

    @property
    def received(self) -> Tensor:
        """Received rows, after the call."""
        return self.output if isinstance(self.output, Tensor) else torch.cat(list(self.output))

    @property
    def changed(self) -> bool:
        """Whether received rows were changed in place since."""
        return self.version != version_of(self.output)

    @property
    def splits(self) -> Splits:
        """Its sizes."""
        return splits_of(len(self.input), sizes_of(self.send), sizes_of(self.receive), self.group.size())


def version_of(output: Tensor | Sequence[Tensor]) -> int:
    """Return how often tensors were changed in place."""
    return output._version if isinstance(output, Tensor) else sum(part._version for part in output)


def sizes_of(sizes: Any) -> Any:
    """Return sizes; None for equal parts, which torch is told by an empty list, too."""
    return None if sizes is None or not len(sizes) else sizes


def watched_functional(output: Tensor, input: Tensor, receive: Any, send: Any, group_name: Any) -> Watched:
    """Return a call of the functional ``all_to_all_single``, whose sizes are one list if the caller gave none."""
    receive, send = (None, None) if receive is send else (receive, send)
    return Watched.of(output, input, receive, send, group_name)


def watched_parts(output: Any, input: Any, group: Any = None, async_op: bool = False) -> Watched | None:
    """Return a call of ``all_to_all``; None if its tensors are not parts of one."""
    output, input = list(output), list(input)
    kinds = {(tensor.dtype, tensor.shape[1:]) for tensor in (*output, *input) if tensor.dim()}
    if len(kinds) != 1 or not all(tensor.dim() for tensor in (*output, *input)):
        return None
    return Watched.of(output, torch.cat(input), [len(t) for t in output], [len(t) for t in input], group)


def functional_operations() -> list[tuple[Any, OpOverloadPacket]]:
    """Return torch's functional all-to-all, each with the namespace that has it."""
    if not dist.is_available():
        return []
    namespaces = (torch.ops._c10d_functional, torch.ops._c10d_functional_autograd)
    return [(space, space.all_to_all_single) for space in namespaces if hasattr(space, "all_to_all_single")]


def group_named(group: Any) -> dist.ProcessGroup:
    """Return a process group that is given as itself, by its name, or as None for all ranks."""
    if isinstance(group, str):
        known: Any = dist.distributed_c10d
        group = known._resolve_process_group(group)
    group = dist.group.WORLD if group is None else group
    assert isinstance(group, dist.ProcessGroup)
    return group


class Arrived(dist.Work):
    """The handle of an exchange whose rows have arrived; on a GPU for the stream that runs now.

    Args:
        device: Device of the rows.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        gpu = devices.of(device)
        self._stream = None if gpu is None else gpu.current_stream(device)

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
            devices.of(self._device).current_stream(self._device).wait_stream(self._stream)


def needs_gradient(value: Any) -> bool:
    """Return whether a value is a tensor that requires a gradient."""
    return isinstance(value, Tensor) and value.requires_grad


def _returned(result: Any) -> tuple[Any, bool]:
    """Return the rows that a Function returns, and whether they are one of a pair."""
    if isinstance(result, AsyncCollectiveTensor):
        return result.wait(), False
    is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dist.Work | None)
    return (result[0] if is_pair else result), is_pair


def _are_sizes(argument: Any, sizes: list[int]) -> bool:
    """Return whether an argument gives these sizes; None and an empty list give equal parts."""
    if getattr(argument, "ndim", None) == 1 and len(argument) == len(sizes):  # a tensor or an array
        argument = argument.tolist()
    if argument is None or (isinstance(argument, list | tuple) and not argument):
        return len(set(sizes)) == 1
    return isinstance(argument, list | tuple) and list(argument) == sizes


def _is_group(argument: Any, group: dist.ProcessGroup) -> bool:
    if argument is None:
        return group is dist.group.WORLD
    return argument is group or (isinstance(argument, str) and argument == group.group_name)


def _same(tensor: Tensor, argument: Any) -> bool:
    """Return whether two tensors are the same values: a Function may see another object, or a contiguous copy."""
    return (
        isinstance(argument, Tensor)
        and tensor.shape == argument.shape
        and tensor.dtype == argument.dtype
        and (tensor.data_ptr() == argument.data_ptr() or torch.equal(tensor, argument))
    )
