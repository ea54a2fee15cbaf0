"""What enters a running segment, in all calls of torch that a block makes.

Contract: a call of torch in a segment sees no tensor with a graph that an earlier segment has made, but a leaf in its
place. A call that torch does not show is found in the first step, by the graph that it makes.

    every call of torch       a mode of torch's functions sees it, and has its tensors replaced
    Function.apply            passes by such modes: while steps last it asks the mode, in all threads; so does grad()
    an all-to-all             functional, or in a declared Function, suspends the forward if the block is cut there
    other collectives         run where they stand: no figure of a step can tell how long they travel
    a checkpoint              is a part of the forward that the engine computes again
    in the first step         exchanges run where they stand, and a lookout notes them
"""

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
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import noop_context_fn

from overlap1f1b.cut.declaration import check, declared_of, functional_operations, group_named, standing, undeclared
from overlap1f1b.cut.edges import ASKS, LAST, applying
from overlap1f1b.cut.exchanges import holds_rows, is_over
from overlap1f1b.cut.weights import SplitGroupedMM, SplitLinear
from overlap1f1b.transport.calls import ExchangeCall, ExchangedRows, Splits, splits_of
from overlap1f1b.transport.functions import plain_apply
from overlap1f1b.transport.suspension import Forward, uncompiled

_NOTHING = nullcontext()
_GRAPH_PROPERTIES = {getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag")}
_OWN = (SplitLinear, SplitGroupedMM)
_OF_THE_TENSOR_ITSELF = {Tensor.register_hook, Tensor.retain_grad, Tensor.requires_grad_, Tensor.backward}


class Lookout:
    """Looks at a forward of the first step: at exchanges that can be hidden, and at those that stay where they stand.

    Args:
        ranks: Global numbers of the ranks that share the experts: exchanges over others are left out.
        others: Those of groups whose collectives are no exchanges, along "cp" and "tp".
        where: Name of the block.
        note: Called with tensors and sizes of each exchange that can be hidden where a gradient comes back.
        say: Called with a line for the user about each that cannot.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        others: Sequence[Sequence[int]],
        where: str,
        note: Callable[[Sequence[Tensor], Splits], object],
        say: Callable[[str], object],
    ) -> None:
        self._ranks, self._others, self._where, self._note, self._say = ranks, others, where, note, say
        self._inside: list[list[str]] = []  # of each Function that runs: its collectives that move rows

    def hides(self, tensors: Sequence[Tensor], splits: Splits, group: dist.ProcessGroup) -> bool:
        """Note an exchange that could suspend the forward; return False, so that it runs where it stands."""
        if is_over(group, self._ranks, splits):
            self._note(tensors, splits)
        else:
            self.travels("an exchange", tensors, group)
        return False

    def travels(self, name: str, arguments: Any, group: dist.ProcessGroup) -> None:
        """Note a collective of torch that moves rows between ranks of the experts: with its Function, or by a line."""
        ranks = dist.get_process_group_ranks(group)
        tensors = (value for value in tree_leaves(arguments) if isinstance(value, Tensor))
        if len({*ranks} & {*self._ranks}) < 2 or ranks in self._others or not holds_rows(tensors):
            return
        if self._inside:
            self._inside[-1].append(name)
        else:
            how = "outside of a Function" if torch.is_grad_enabled() else "without a gradient"
            self._say(standing(f"{name} {how}, in {self._where},"))

    def run(self, function: type[torch.autograd.Function], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Apply a Function where it stands, and look at it."""
        declared = declared_of(function)
        self._inside.append([])
        try:
            result = plain_apply(function)(*args, **kwargs)
            if declared is not None:
                with torch._C.DisableTorchFunction():
                    check(declared, function, args, result, self._ranks)
        finally:
            exchanged = self._inside.pop()
        # Who calls these two asks, for each exchange, whether it can be hidden.
        if exchanged and declared is None and function is not ExchangedRows:
            self._say(undeclared(function))
        return result


class CrossingMode(TorchFunctionMode):
    """Hands every tensor argument of torch's functions to a forward, which may replace it.

    ``autograd.Function.apply`` passes by torch's function modes: see :func:`functions_cross`.

    Args:
        entered: Returns a tensor, or what enters the running segment in its place; None if nothing enters, as in a
            second forward, whose graph is not walked.
        apart: Called with a weight whose gradient a layer leaves to a queue.
        lookout: Looks on in the first step, in which all exchanges run where they stand.
    """

    ended = False
    """Whether the forward has nothing left to run. Torch takes a mode off while it is called, and after a Ctrl-C it may
    put it back later, when Python collects what was interrupted: it then does nothing."""

    def __init__(
        self,
        entered: Callable[[Tensor], Tensor] | None = None,
        apart: Callable[[Parameter], object] = lambda weight: None,
        lookout: Lookout | None = None,
    ) -> None:
        super().__init__()
        # A compiler looks into whatever a call in its region runs.
        self._entered = None if entered is None else uncompiled(entered)
        self.apart, self.lookout = apart, lookout

    def end(self) -> None:
        """Do nothing any more, and let go of the forward."""
        self.ended, self._entered, self.lookout = True, None, None
        self.apart = lambda weight: None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._entered is None:
            return func(*args, **kwargs)
        if (func.__name__ == "__get__" and func not in _GRAPH_PROPERTIES) or func in _OF_THE_TENSOR_ITSELF:
            return func(*args, **kwargs)
        if self.lookout is not None:
            self._look(self.lookout, func, args, kwargs)
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        before = args
        with torch._C.DisableTorchFunction():
            args, kwargs = self.replaced(args), self.replaced_by_name(kwargs) if kwargs else kwargs
        if func is torch.autograd.grad and any(
            new is not old and not isinstance(old, Parameter) for new, old in zip(args[1], before[1], strict=True)
        ):
            raise ValueError(
                "a block calls torch.autograd.grad behind an exchange for a tensor that it made before it; "
                "allowed: for one that it made behind it"
            )
        return func(*args, **kwargs)

    @staticmethod
    def _look(lookout: Lookout, func: Any, args: Any, kwargs: Any) -> None:
        """Show the lookout a collective of torch, called in either of its two forms."""
        if getattr(func, "__module__", "") == c10d.__name__:
            every = [*args, *kwargs.values()]
            group = next((value for value in every if isinstance(value, dist.ProcessGroup)), None)
            lookout.travels(func.__name__, (args, kwargs), group_named(group))
        elif getattr(func, "_qualified_op_name", "").startswith("_c10d_functional"):
            groups = [value for value in (*args, *kwargs.values()) if isinstance(value, str)]
            if groups and func.__name__ != "all_to_all_single":
                lookout.travels(func.__name__, (args, kwargs), group_named(groups[-1]))

    def replaced(self, values: Sequence[Any]) -> Any:
        """Return arguments with the tensors that enter: the same objects where none does."""
        entered, new = self._entered, []
        if entered is None:
            return values
        for value in values:
            if isinstance(value, Tensor):
                new.append(entered(value))
            elif isinstance(value, (tuple, list)) and type(value) is not torch.Size:
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


def _exchanged(tensor: Tensor, send: Any, receive: Any, group: dist.ProcessGroup) -> Tensor | None:
    """Return what an all-to-all of the model's own brings; None if it is to run where it stands."""
    forward = Forward.running()
    splits = splits_of(len(tensor), send, receive, group.size())
    if forward is None or not forward.handlers.hides((tensor,), splits, group):
        return None
    rows: Tensor = forward.handlers.bring(lambda: forward.suspend([ExchangeCall([tensor], splits, False)]))[0]
    return rows


def _hidden(function: type, args: Sequence[Any]) -> Any:
    """Return what a declared Function would, by a hidden exchange; None if it is to run where it stands."""
    declared = declared_of(function)
    rows = None if declared is None else _exchanged(*declared.call(args))
    return None if declared is None or rows is None else declared.result(args, rows)


class Asking(OpOverloadPacket):
    """The functional all-to-all, which first asks the mode in force."""

    @classmethod
    def instead_of(cls, operation: OpOverloadPacket) -> Asking:
        """Return an operation that asks, and is else as it was: compilers look into it."""
        asking = object.__new__(cls)
        asking.__dict__.update(operation.__dict__)
        return asking

    def __call__(self, input: Tensor, output_split_sizes: Any, input_split_sizes: Any, group_name: Any) -> Any:
        mode = running_mode()
        if mode is not None and torch.is_grad_enabled():
            rows = _exchanged(input, input_split_sizes, output_split_sizes, group_named(group_name))
            if rows is not None:
                return rows
        elif mode is not None and mode.lookout is not None:
            mode.lookout.travels("all_to_all_single", input, group_named(group_name))
        return super().__call__(input, output_split_sizes, input_split_sizes, group_name)


def _repeating(plain: Callable[..., Iterator[None]]) -> Callable[..., Iterator[None]]:
    """Return what torch runs around a function in a checkpoint, for functions that a suspended forward computes again.

    Torch's own would run the function again in the backward of each of its segments, and exchange its rows each time.
    """

    @wraps(plain)
    def around(*args: Any, **kwargs: Any) -> Iterator[None]:
        """Run the part under the engine's checkpoint where a forward is suspended, else under torch's."""
        forward = Forward.running()
        part = None if forward is None else forward.handlers.checkpoint
        if part is None or not torch.is_grad_enabled():
            yield from plain(*args, **kwargs)
            return
        # Torch's own takes ``fn``, ``args``, ``kwargs`` and ``context_fn``.
        arguments = signature(plain).bind(*args, **kwargs).arguments
        function = partial(arguments["fn"], **arguments.get("kwargs", {}))
        with part(function, arguments.get("args", ()), *arguments.get("context_fn", noop_context_fn)()):
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


def eager(mode: bool, inside: AbstractContextManager[None] = _NOTHING) -> AbstractContextManager[None]:
    """Return the context ``inside``, in which nothing is compiled if a mode is in force: compiled code goes past it."""
    return _eagerly(inside) if mode and "torch._dynamo" in sys.modules else inside


@contextmanager
def _eagerly(inside: AbstractContextManager[None]) -> Iterator[None]:
    """Compile nothing inside the context: in no thread, since the compiler's stance is the process's."""
    crossing: Any = LAST.__dict__["crossing"]
    with _CHANGING:
        if not crossing.eager:
            crossing.stance = torch.compiler.set_stance("force_eager")
        crossing.eager += 1
    try:
        with inside:
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
    torch 2.14 calls directly). The functional all-to-all asks it, too. A function mode is no place to suspend a
    forward: torch's bindings are then on the stack, and do not bear a switch. Checkpoints ask the forward itself.
    """

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply a Function: a product of ours, one that a lookout watches, one whose exchange hides, or any other."""
        mode = running_mode() if torch._C._len_torch_function_stack() else None
        if mode is None or not torch.is_grad_enabled():
            return plain_apply(cls)(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            if cls in _OWN:  # it queues the gradient of its weight
                mode.apart(*args[1])
                args = (*mode.replaced(args[:1]), args[1], *mode.replaced(args[2:]))
            else:
                args, kwargs = mode.replaced(args), mode.replaced_by_name(kwargs)
        if cls in _OWN:
            return applied_outside(mode, cls, *args, **kwargs)
        if mode.lookout is not None:
            result = mode.lookout.run(cls, args, kwargs)
            _hidden(cls, args)  # so that the lookout notes the exchange, which runs where it stands
            return result
        hidden = _hidden(cls, args)
        return applied_outside(mode, cls, *args, **kwargs) if hidden is None else hidden

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
        namespace.all_to_all_single = Asking.instead_of(operation)
    checkpoints: Any = torch.utils.checkpoint
    name = "_checkpoint_without_reentrant_generator"
    name += "_impl" * hasattr(checkpoints, f"{name}_impl")  # from torch 2.14 on
    around = getattr(checkpoints, name)
    crossing.callback(setattr, checkpoints, name, around)
    setattr(checkpoints, name, _repeating(around))
    crossing.callback(applying(apply))
