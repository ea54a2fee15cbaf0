"""Replace what an earlier segment has made by what may enter the running segment, in all calls of torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import copy
from functools import partial, wraps
from inspect import signature
from operator import is_
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch._ops import OpOverloadPacket
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import noop_context_fn

from overlap1f1b.cut.declaration import (
    Arrived,
    Watched,
    declared_of,
    functional_operations,
    group_named,
    sizes_of,
    watched_functional,
    watched_parts,
)
from overlap1f1b.cut.edges import ASKS, LAST, applying
from overlap1f1b.cut.weights import SplitGroupedMM, SplitLinear
from overlap1f1b.transport.calls import ExchangeCall, splits_of
from overlap1f1b.transport.functions import plain_apply
from overlap1f1b.transport.suspension import Forward, uncompiled

_GRAPH_PROPERTIES = {getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag")}
_OWN = (SplitLinear, SplitGroupedMM)
_OF_THE_TENSOR_ITSELF = {Tensor.register_hook, Tensor.retain_grad, Tensor.requires_grad_, Tensor.backward}


class Replaces:
    """A forward that decides what enters its running segment, and which exchanges suspend it."""

    again = False
    """Whether a part of the forward runs a second time: nothing enters it, since its graph is not walked."""
    noting = False
    """Whether exchanges are noted, and run where they stand: in the first step."""
    inside: list[Watched] | None = None
    """All-to-alls of torch inside the Function that runs in the first step; None outside."""
    forward: Forward | None = None
    """What an exchange may suspend; None if nothing."""
    hides_plain = False
    """Whether plain calls of ``all_to_all_single`` suspend the forward."""

    def entered(self, tensor: Tensor) -> Tensor:
        """Return the tensor, or what enters the running segment in its place."""
        raise NotImplementedError

    def used_apart(self, weight: Parameter) -> None:
        """Note that a layer uses a weight whose gradient it leaves to a queue."""

    def called(self, function: type, args: Sequence[Any], calls: Sequence[Watched], result: Any) -> None:
        """Note a call of a Function in the first step, with the all-to-alls inside it."""

    def called_plain(self, call: Watched) -> None:
        """Note a plain call of ``all_to_all_single`` in the first step, outside of any Function."""

    def claim(self, output: Tensor) -> Tensor | None:
        """Return the rows of a hidden plain call, for the Function that adds its backward; None if there is none."""

    def fill(self, output: Tensor, rows: Tensor) -> None:
        """Fill the output of a hidden plain call with the rows that it has brought."""


class CrossingMode(TorchFunctionMode):
    """Hands every tensor argument of torch's functions to a forward, which may replace it.

    ``autograd.Function.apply`` passes by torch's function modes: see :func:`functions_cross`.
    """

    ended = False
    """Whether the forward has nothing left to run. Torch takes a mode off while it is called, and after a Ctrl-C it may
    put it back later, when Python collects what was interrupted: it then does nothing."""

    def __init__(self, run: Replaces) -> None:
        super().__init__()
        self.run = run
        self._entered = uncompiled(run.entered)  # a compiler looks into whatever a call in its region runs

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.ended or self.run.again:
            return func(*args, **kwargs)
        if (func.__name__ == "__get__" and func not in _GRAPH_PROPERTIES) or func in _OF_THE_TENSOR_ITSELF:
            return func(*args, **kwargs)
        run = self.run
        if run.inside is not None and func in (c10d.all_to_all_single, dist.all_to_all):
            read, result = Watched.of if func is c10d.all_to_all_single else watched_parts, func(*args, **kwargs)
            call = read(*args, **kwargs)
            run.inside += [] if call is None else [call]
            return result
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        given = args
        with torch._C.DisableTorchFunction():
            args, kwargs = self.replaced(args), self.replaced_by_name(kwargs)
        if func is torch.autograd.grad and any(
            new is not old and not isinstance(old, Parameter) for new, old in zip(args[1], given[1], strict=True)
        ):
            raise ValueError(
                "a block calls torch.autograd.grad behind an exchange for a tensor that it made before it; "
                "allowed: for one that it made behind it"
            )
        return func(*args, **kwargs)

    def replaced(self, values: Sequence[Any]) -> Any:
        """Return arguments with the tensors that enter: the same objects where none does."""
        entered, new = self._entered, []
        for value in values:
            if isinstance(value, Tensor):
                new.append(entered(value))
            elif isinstance(value, (tuple, list)):
                new.append(self.replaced(value))
            else:
                new.append(self.replaced_by_name(value) if isinstance(value, dict) else value)
        if all(map(is_, new, values)):
            return values
        make: Any = values._make if hasattr(values, "_make") else type(values)
        return make(new)

    def replaced_by_name(self, values: dict[Any, Any]) -> dict[Any, Any]:
        """Return :meth:`replaced` of arguments that have names."""
        if not values:
            return values
        every = list(values.values())
        new = self.replaced(every)
        if new is every:
            return values
        copied = copy(values)
        copied.update(zip(values, new, strict=True))
        return copied


def running_mode() -> CrossingMode | None:
    """Return the mode in force."""
    for at in reversed(range(torch._C._len_torch_function_stack())):
        mode = torch._C._get_function_stack_at(at)
        if isinstance(mode, CrossingMode) and not mode.ended:
            return mode
    return None


def applied_outside(mode: CrossingMode, function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
    """Apply a Function with the mode off, if no other mode lies above it: it has nothing to replace in a Function."""
    apply = plain_apply(function)
    if torch._C._get_function_stack_at(torch._C._len_torch_function_stack() - 1) is not mode:
        return apply(*args, **kwargs)
    torch._C._pop_torch_function_stack()
    try:
        return apply(*args, **kwargs)
    finally:
        if running_mode() is not mode:  # a forward that was suspended inside has it back already
            torch._C._push_on_torch_function_stack(mode)


def _exchanged(run: Replaces, tensor: Tensor, send: Any, receive: Any, group: dist.ProcessGroup) -> Tensor | None:
    """Return what an all-to-all of the model's own brings; None if it is to run where it stands."""
    forward = Forward.running()
    splits = splits_of(len(tensor), send, receive, group.size())
    if forward is not run.forward or forward is None or not forward.hides((tensor,), splits, group):
        return None
    rows: Tensor = forward.bring(lambda: forward.suspend([ExchangeCall([tensor], splits, False)]))[0]
    return rows


def _hidden(run: Replaces, function: type, args: Sequence[Any]) -> Any:
    """Return what a declared Function would, by a hidden exchange; None if it is to run where it stands."""
    declared = declared_of(function)
    if declared is None:
        return None
    claims = declared.backward_only
    rows = run.claim(declared.given("output", args)) if claims else _exchanged(run, *declared.of(args))
    return None if rows is None else declared.result(args, rows)


class Asking(OpOverloadPacket):
    """The functional all-to-all, which first asks the mode in force."""

    @classmethod
    def of(cls, operation: OpOverloadPacket) -> Asking:
        """Return an operation that asks, and is else as it was: compilers look into it."""
        asking = object.__new__(cls)
        asking.__dict__.update(operation.__dict__)
        return asking

    def __call__(self, input: Tensor, output_split_sizes: Any, input_split_sizes: Any, group_name: Any) -> Any:
        mode = running_mode()
        if mode is not None and torch.is_grad_enabled():
            rows = _exchanged(mode.run, input, input_split_sizes, output_split_sizes, group_named(group_name))
            if rows is not None:
                return rows
        output = super().__call__(input, output_split_sizes, input_split_sizes, group_name)
        if mode is not None and mode.run.inside is not None and not torch.is_grad_enabled():
            mode.run.inside += [watched_functional(output, input, output_split_sizes, input_split_sizes, group_name)]
        return output


def asking_single(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``all_to_all_single``, whose calls suspend the forward if a Function behind them adds their backward."""

    @wraps(plain)
    def all_to_all_single(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return plain(*args, **kwargs)
        mode = running_mode()
        if mode is None or not torch.is_grad_enabled() or not (mode.run.noting or mode.run.hides_plain):
            return plain(*args, **kwargs)
        if mode.run.noting:
            result = plain(*args, **kwargs)
            mode.run.called_plain(Watched.of(*args, **kwargs))
            return result
        call = Watched.of(*args, **kwargs)
        rows = _exchanged(mode.run, call.input, sizes_of(call.send), sizes_of(call.receive), call.group)
        if rows is None:
            return plain(*args, **kwargs)
        assert isinstance(call.output, Tensor)
        mode.run.fill(call.output, rows)
        return Arrived(rows.device) if call.later else None

    return all_to_all_single


def _repeating(plain: Callable[..., Iterator[None]]) -> Callable[..., Iterator[None]]:
    """Return what torch runs around a function in a checkpoint, for functions that a suspended forward computes again.

    Torch's own would run the function again in the backward of each of its segments, and exchange its rows each time.
    """
    parameters = signature(plain)

    @wraps(plain)
    def around(*args: Any, **kwargs: Any) -> Iterator[None]:
        forward = Forward.running()
        if forward is None or forward.again is None or not torch.is_grad_enabled():
            yield from plain(*args, **kwargs)
            return
        given = parameters.bind(*args, **kwargs).arguments
        function = partial(given["fn"], **given.get("kwargs", {}))
        with forward.again(function, given.get("args", ()), *given.get("context_fn", noop_context_fn)()):
            yield

    return around


class _Crossing(ExitStack):
    """The changes of torch that :func:`functions_cross` has made.

    Callbacks change torch back, not generators: a Ctrl-C may come while they run, and Python would finish a generator
    when it collects it, perhaps inside a later step.
    """

    users = 0  # steps and stages that use them
    eager = 0  # segments that run, in which nothing may be compiled
    stance: Any = None  # the compiler's in these segments; None outside

    def compile_again(self) -> None:
        """Set the compiler's stance to what it was before these segments."""
        if self.stance is not None:
            self.stance.__exit__(None, None, None)
            self.stance = None


_CHANGING = Lock()


def eager(mode: bool) -> AbstractContextManager[None]:
    """Return a context in which nothing is compiled if a mode is in force, since compiled code goes past it."""
    return _eagerly() if mode and "torch._dynamo" in sys.modules else nullcontext()


@contextmanager
def _eagerly() -> Iterator[None]:
    """Compile nothing inside the context: in no thread, since the compiler's stance is the process's."""
    crossing: Any = LAST.__dict__["crossing"]
    with _CHANGING:
        if not crossing.eager:
            crossing.stance = torch.compiler.set_stance("force_eager")
        crossing.eager += 1
    try:
        yield
    finally:
        with _CHANGING:
            crossing.eager -= 1
            if not crossing.eager:
                crossing.compile_again()


@contextmanager
def functions_cross() -> Iterator[None]:
    """Hand the arguments of ``autograd.Function.apply`` to the mode in force, inside the context.

    Torch is changed for all threads as long as any of them is inside; a thread without a mode notices nothing.
    """
    with _CHANGING:
        crossing: Any = LAST.__dict__.get("crossing")
        if crossing is None:
            crossing = _Crossing()
            try:
                _change(crossing)
            except BaseException:  # Ctrl-C: the next step makes all changes again
                crossing.close()
                raise
            LAST.crossing = crossing
        crossing.users += 1
    try:
        yield
    finally:
        with _CHANGING:
            crossing.users -= 1
            if not crossing.users:
                del LAST.crossing
                crossing.close()


def _change(crossing: _Crossing) -> None:
    """Let torch ask the mode in force, until ``crossing`` is closed.

    What changes is the method that ``apply`` calls: models keep ``MyFunction.apply`` under names of their own (which
    torch 2.14 calls directly). The functional all-to-all and ``all_to_all_single`` ask it, too. A function mode is no
    place to suspend a forward: torch's bindings are then on the stack, and do not bear a switch. Checkpoints ask the
    forward itself.
    """

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        mode = running_mode() if torch._C._len_torch_function_stack() else None
        if mode is None or not torch.is_grad_enabled():
            return plain_apply(cls)(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            if cls in _OWN:  # it queues the gradient of its weight
                mode.run.used_apart(*args[1])
                args = (*mode.replaced(args[:1]), args[1], *mode.replaced(args[2:]))
            else:
                args, kwargs = mode.replaced(args), mode.replaced_by_name(kwargs)
        run = mode.run
        if cls in _OWN:
            return applied_outside(mode, cls, *args, **kwargs)
        if not run.noting:
            result = _hidden(run, cls, args)
            return applied_outside(mode, cls, *args, **kwargs) if result is None else result
        before, calls = run.inside, list[Watched]()
        run.inside = calls
        try:
            result = plain_apply(cls)(*args, **kwargs)
        finally:
            run.inside = before
        run.called(cls, args, calls, result)
        _hidden(run, cls, args)  # notes it
        return result

    autograd: Any = torch.autograd
    plain = autograd.grad

    def grad(*args: Any, **kwargs: Any) -> Any:
        # A checkpoint's own backward asks for weights in this way: no edge leads to them.
        before = ASKS.set(bool(kwargs.get("allow_unused")) and torch._C._current_graph_task_id() >= 0)
        try:
            return plain(*args, **kwargs)
        finally:
            ASKS.reset(before)

    crossing.callback(crossing.compile_again)  # for a Ctrl-C inside a segment
    crossing.callback(setattr, autograd, "grad", plain)
    autograd.grad = uncompiled(grad)
    for namespace, operation in functional_operations():
        crossing.callback(setattr, namespace, "all_to_all_single", operation)
        namespace.all_to_all_single = Asking.of(operation)
    checkpoints: Any = torch.utils.checkpoint
    name = "_checkpoint_without_reentrant_generator"
    name += "_impl" * hasattr(checkpoints, f"{name}_impl")  # from torch 2.14 on
    around = getattr(checkpoints, name)
    crossing.callback(setattr, checkpoints, name, around)
    setattr(checkpoints, name, _repeating(around))
    collectives: Any = dist
    crossing.callback(setattr, collectives, "all_to_all_single", collectives.all_to_all_single)
    collectives.all_to_all_single = asking_single(collectives.all_to_all_single)
    crossing.callback(applying(apply))
