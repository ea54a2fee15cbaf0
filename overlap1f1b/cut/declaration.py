"""``autograd.Function``s that are an all-to-all and no more: which of their arguments is what.

Those of common libraries stand in a table. A user declares others by :func:`declare`. Nothing else about a Function is
guessed: the first step exchanges the rows of a declared Function once more, and compares.
"""

from collections.abc import Sequence
from datetime import timedelta
from inspect import signature
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverloadPacket
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from overlap1f1b.schedule.values import checked
from overlap1f1b.transport import devices
from overlap1f1b.transport.calls import splits_of

_ATTRIBUTE = "_overlap1f1b_declared"


class Declared(NamedTuple):
    """Positions of an all-to-all's arguments in ``MyFunction.apply``, see :func:`declare`."""

    tensor: int
    send: int | None = None
    receive: int | None = None
    group: int | None = None
    output: int | None = None
    async_op: int | None = None

    def argument(self, name: str, args: Sequence[Any]) -> Any:
        """Return an argument of a call by its name here; None if it was not given."""
        at = getattr(self, name)
        return args[at] if at is not None and at < len(args) else None

    def call(self, args: Sequence[Any]) -> tuple[Tensor, Any, Any, dist.ProcessGroup]:
        """Return tensor, sizes to send, sizes to receive, and group of a call."""
        send, receive, group = (self.argument(name, args) for name in ("send", "receive", "group"))
        return args[self.tensor], sizes_of(send), sizes_of(receive), group_named(group)

    def result(self, args: Sequence[Any], received: Tensor) -> Any:
        """Return what the Function would, for the rows that its exchange has brought."""
        output = self.argument("output", args)
        rows = received if output is None else output.copy_(received)
        if self.async_op is None:
            return rows
        return rows, Arrived(rows.device) if self.argument("async_op", args) else None


KNOWN = {
    ("veomni.distributed.moe.comm", "_AllToAll"): Declared(tensor=1, send=3, receive=2, group=0),
    ("fairscale.nn.moe.moe_layer", "_AllToAll"): Declared(tensor=1, group=0),
    ("deepspeed.module_inject.auto_ep_layer", "_AllToAllV"): Declared(tensor=1, send=2, receive=3, group=0),
    ("deepspeed.moe.sharded_moe", "_AllToAll"): Declared(tensor=1, group=0),
    ("megablocks.layers.all_to_all", "AllToAllOp"): Declared(tensor=0, send=2, receive=1, group=3, async_op=4),
    ("megatron.core.tensor_parallel.mappings", "_AllToAll"): Declared(tensor=1, send=3, receive=2, group=0),
    ("olmo_core.ops.moe", "AllToAllOp"): Declared(tensor=0, send=2, receive=1, group=3, async_op=4),
    ("torch.distributed.nn.functional", "_AlltoAllSingle"): Declared(tensor=4, send=3, receive=2, group=0, output=1),
    ("tutel.impls.communicate", "PrimAllToAll"): Declared(tensor=0, group=1),
}
"""Functions of libraries, by module and name."""


@checked
def declare(
    function: type[torch.autograd.Function],
    *,
    tensor: int,
    send: int | None = None,
    receive: int | None = None,
    group: int | None = None,
    output: int | None = None,
    async_op: int | None = None,
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

    Raises:
        ValueError: Not a Function, or positions that are negative or stand for two arguments.
    """
    if not issubclass(function, torch.autograd.Function):
        raise ValueError(f"declare({function!r}); allowed: a subclass of torch.autograd.Function")
    declared = Declared(tensor, send, receive, group, output, async_op)
    places = [tensor, *[at for at in (send, receive, group, output, async_op) if at is not None]]
    same = len(places) - len(set(places)) - (send is not None and send == receive)
    if same or not all(type(at) is int and at >= 0 for at in places):
        stated = ", ".join(f"{name}={at!r}" for name, at in declared._asdict().items() if at is not None)
        raise ValueError(
            f"declare({function.__qualname__}, {stated}); allowed: positions from 0, each for one argument (send and "
            "receive may share one)"
        )
    takes = [one for name, one in signature(function.forward).parameters.items() if name != "ctx"]
    if max(places) >= len(takes) and all(one.kind is one.POSITIONAL_OR_KEYWORD for one in takes):
        what = f"declare({function.__qualname__}, …) with position {max(places)}"
        raise ValueError(f"{what}; allowed: 0 to {len(takes) - 1}, as in {_signature(function)}")
    setattr(function, _ATTRIBUTE, declared)


def declared_of(function: type) -> Declared | None:
    """Return the declaration of a Function; None if it has none."""
    own: Declared | None = vars(function).get(_ATTRIBUTE)
    return own or KNOWN.get((function.__module__, function.__qualname__))


def check(declared: Declared, function: type, args: Sequence[Any], result: Any, ranks: Sequence[int]) -> None:
    """Exchange the rows of a call in the first step as its declaration says, and later their gradients; compare.

    An exchange over others than ``ranks``, those that share the experts, is not checked. ValueError if the call did
    something else; where sizes do not fit, on all ranks.
    """
    name = f"{function.__module__}.{function.__qualname__} is declared, and"
    allowed = f"positions of an all-to-all's arguments in {_signature(function)}"
    try:
        tensor, send, receive, group = declared.call(args)
    except (IndexError, RuntimeError, TypeError) as error:
        raise ValueError(f"{name} has no such arguments: {error}; allowed: {allowed}") from error
    if list(ranks) != dist.get_process_group_ranks(group):
        return
    sizes = _sizes_everywhere(tensor, send, receive, group)
    if not torch.equal(sizes[:, 0], sizes[:, 1].T):
        raise ValueError(f"{name} sizes of its call do not fit on all ranks; allowed: {allowed}")
    (sent, received), rows = sizes[group.rank()].tolist(), result
    is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dist.Work | None)
    if is_pair:
        rows, handle = result
        if handle is not None:
            handle.wait()
    elif isinstance(result, AsyncCollectiveTensor):
        rows = result.wait()
    checked = {
        "rows": _same(rows, _exchanged(tensor, sent, received, group)),
        "output": declared.output is None or _same(rows, declared.argument("output", args)),
        "async_op": is_pair == (declared.async_op is not None),
    }
    if wrong := [what for what, is_right in checked.items() if not is_right]:
        raise ValueError(f"{name} its call shows another {', '.join(wrong)}; allowed: {allowed}")
    if not rows.requires_grad:
        return
    at = sum(isinstance(arg, Tensor) for arg in args[: declared.tensor])  # a node has gradients of tensors alone

    def check_backward(grads: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> None:
        if not _same(grads[at], _exchanged(inputs[0], received, sent, group)):
            raise ValueError(f"{name} its backward does more than an all-to-all; allowed: Functions that do no more")

    rows.grad_fn.register_hook(check_backward)


def _sizes_everywhere(tensor: Tensor, send: Any, receive: Any, group: dist.ProcessGroup) -> Tensor:
    """Return what each rank sends and receives, ``[ranks, 2, ranks]``; of negative sizes where rows do not fit."""
    try:
        splits = splits_of(len(tensor), send, receive, group.size())
        mine = torch.tensor([splits.send, splits.receive], device=tensor.device)
    except (TypeError, ValueError):
        mine = torch.tensor([[-1] * group.size(), [-2] * group.size()], device=tensor.device)
    every = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(every, mine, group)
    return torch.stack(every).cpu()


def _exchanged(tensor: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    rows = tensor.new_empty((sum(receive), *tensor.shape[1:]))
    dist.all_to_all_single(rows, tensor.detach().contiguous(), receive, send, group=group)
    return rows


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or one.shape != other.shape:
        return False
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _signature(function: Any) -> str:
    names = [name for name in signature(function.forward).parameters if name != "ctx"]
    return f"{function.__name__}.apply({', '.join(names)})"


def standing(what: str) -> str:
    """Return what to tell of a collective that moves rows outside of a Function."""
    return (
        f"{what} exchanges rows where it stands, and is not hidden; allowed: overlap1f1b.exchange, torch's functional "
        "all_to_all_single, or a declared Function"
    )


def undeclared(function: type) -> str:
    """Return what to tell of a Function that exchanges rows, and that nobody has declared."""
    return (
        f"{function.__module__}.{function.__qualname__} exchanges rows where it stands, and is not hidden; allowed: "
        f"overlap1f1b.exchange, or, if it is an all-to-all and no more, overlap1f1b.declare({function.__name__}, "
        f"tensor=?, send=?, receive=?, group=?) with positions in {_signature(function)}"
    )


def sizes_of(sizes: Any) -> Any:
    """Return sizes; None for equal parts, which torch is told by an empty list, too."""
    return None if sizes is None or not len(sizes) else sizes


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
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"{group!r} as a process group")
    return group


class Arrived(dist.Work):
    """The handle of an exchange whose rows have arrived, on a GPU for the stream that runs now."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        gpu = devices.gpu_of(device)
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
            devices.gpu_of(self._device).current_stream(self._device).wait_stream(self._stream)
