"""Suspend a module's forward where it exchanges rows.

This file reads private attributes of torch: no public function shows or sets the stacks of hooks and modes.
"""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from operator import call
from typing import Any, NamedTuple

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from overlap1f1b.transport import devices

Exchanged = Callable[[], tuple[Any, ...]]
"""It exchanges rows, and returns what that brings."""


class Stack(greenlet):
    """A stack on which forwards run one after another, since the system has to map memory for every new stack."""

    forward: Forward | None = None  # the forward that runs, or is suspended, on it

    def __init__(self) -> None:
        super().__init__(self._main)

    def _main(self) -> None:  # without arguments: a greenlet would keep them alive until it ends
        assert self.parent is not None
        while True:
            assert self.forward is not None
            self.forward.run()
            self.parent.switch()

    def end(self) -> None:
        """Release the stack, which nothing uses any more: its own frames hold it."""
        self.parent = getcurrent()
        self.throw(GreenletExit)


class Handlers(NamedTuple):
    """What a function on a stack of its own does where it exchanges rows, or computes between exchanges.

    Args:
        part: Runs what the function computes between two exchanges, given with its arguments: an engine may drop its
            activations and call it again before its backward. None if nothing is computed again.
        checkpoint: Returns the context of the first forward of a part of the function, given with its arguments and the
            contexts of its first and its second forward. None if checkpoints run as they are.
        bring: Returns what a function that exchanges rows returns; a second forward takes it from the first, and calls
            no function. ``own`` says that the model may change it in place.
        hides: Returns whether an exchange ``(tensors, splits, group)`` of the model's own suspends the function.
        parts: Parts of the tokens of a call of experts, each with exchanges of its own.
    """

    part: Callable[..., Any] | None = None
    checkpoint: Callable[..., AbstractContextManager[Any]] | None = None
    bring: Callable[..., tuple[Any, ...]] = lambda exchange, own=False: exchange()
    hides: Callable[..., bool] = lambda *_: False
    parts: int = 1


NO_HANDLERS = Handlers()


class Forward:
    """``function(*args)`` on a stack of its own, which is suspended at every exchange.

    :meth:`start` and :meth:`resume` return what the function hands out at its next exchange, or its own result. It
    takes one of the free ``stacks``, which is there again when it has ended. A function ``mode`` is for the parts of
    the function in which it is wanted (:attr:`with_mode`), and lies below its own modes. ``name`` is for messages.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        device: torch.device,
        stacks: list[Stack],
        mode: TorchFunctionMode | None = None,
        handlers: Handlers = NO_HANDLERS,
    ) -> None:
        self.function, self.name, self.device, self.mode = function, name, device, mode
        self.handlers = handlers
        self._stacks = stacks
        self._stack: Stack | None = None
        self._value: Any = None  # to the function: its arguments, or the result of its exchange
        self._passed: Any = None  # by the function
        self._outside: ThreadState  # of the thread, where the function was started or resumed last
        self.inside: ThreadState  # of the function, where it is suspended
        self._grad = False
        self.with_mode = False

    @staticmethod
    def running() -> Forward | None:
        """Return the forward on whose stack this is called; None outside."""
        # A graph cannot switch stacks. `is_compiling` would be true while any other thread compiles.
        if torch.compiler.is_dynamo_compiling():
            return None
        current = getcurrent()
        return current.forward if isinstance(current, Stack) else None

    def handle(self, handlers: Handlers) -> Handlers:
        """Go on with other handlers; return the ones before."""
        before, self.handlers = self.handlers, handlers
        return before

    def start(self, args: tuple[Any, ...], outside: ThreadState, *, grad: bool, mode: bool = False) -> Any:
        """Run the function to its first exchange, with gradients if ``grad``, and with the mode if ``mode``.

        ``outside`` is the thread's present state.

        It is called as :meth:`resume` is, from the same depth of C calls, and so are all forwards of its stacks: torch
        walks the stack where it makes an error, and a greenlet that was started at another depth than it is resumed at
        would end the process there.
        """
        self._grad = grad
        self._stack = stack = self._stacks.pop() if self._stacks else Stack()
        stack.forward, self._context = self, contextvars.copy_context()
        stack.gr_context = self._context
        return self.resume(args, outside, mode=mode)

    def resume(self, result: Any, outside: ThreadState, *, mode: bool = False) -> Any:
        """Return the exchange's result inside the function, and run it to the next one."""
        assert self._stack is not None
        self._stack.parent, self._outside = getcurrent(), outside
        self.with_mode, self._value = mode and self.mode is not None, result
        del result
        self._stack.switch()
        if self._stack is None:  # what it has set stays, as after a plain call
            for variable, value in self._context.items():
                if variable.get(None) is not value:
                    variable.set(value)
        passed, self._passed = self._passed, None
        return passed

    def stop(self) -> None:
        """Unwind a suspended function: its ``finally`` blocks and context managers run."""
        if self._stack is not None:
            self._stack.parent, self._outside = getcurrent(), ThreadState.capture(self.device)
            self._stack.throw(GreenletExit)

    def _take(self) -> Any:
        value, self._value = self._value, None
        return value

    def run(self) -> None:
        """Run the whole function, on its own stack."""
        try:
            if self.with_mode:
                _C._push_on_torch_function_stack(self.mode)
            _C._set_grad_enabled(self._grad)
            self._passed = self.function(*self._take())
        finally:
            stack, self._stack = self._stack, None
            self._outside.restore(ThreadState.capture(self.device), self.name)
        assert stack is not None
        stack.forward = None
        self._stacks.append(stack)

    def _with(self, inside: ThreadState) -> ThreadState:
        """Return a state of the function with the mode where it is wanted, else without."""
        if self.with_mode == (self.mode in inside.function_modes):
            return inside
        modes = [mode for mode in inside.function_modes if mode is not self.mode]
        if self.with_mode:  # below the function's own modes, which it leaves by itself
            modes.insert(len(self._outside.function_modes), self.mode)
        return inside._replace(function_modes=tuple(modes))

    def without_mode(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function with the mode off: all that it is given was made behind the last exchange."""
        if not self.with_mode or _C._get_function_stack_at(_C._len_torch_function_stack() - 1) is not self.mode:
            return function(*args)
        _C._pop_torch_function_stack()
        try:
            return function(*args)
        finally:
            _C._push_on_torch_function_stack(self.mode)

    def suspend(self, passed: object) -> Any:
        """Leave the function here; return the value that it is resumed with, in the same state of the thread.

        Called on the function's own stack. Whoever has started or resumed it receives ``passed``.
        """
        self.inside = inside = ThreadState.capture(self.device)
        self._outside.restore(inside, self.name)
        assert self._stack is not None
        assert self._stack.parent is not None
        self._passed = passed
        del passed
        try:
            self._stack.parent.switch()
        finally:  # the function's own context managers must find their state, also when it is stopped
            self._with(inside).restore(self._outside, self.name)
        return self._take()


def computed_once(function: Callable[[], Tensor]) -> Tensor:
    """Return ``function()``, which exchanges rows; a second forward takes the result of the first."""
    forward = Forward.running()
    return function() if forward is None else forward.handlers.bring(lambda: (function(),), own=True)[0]


OUTSIDE = "the engine goes on outside the compiled graph"


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function so that ``torch.compile`` breaks the graph of its caller around it.

    A graph cannot switch stacks or queue weight gradients. A caller that is compiled with ``fullgraph=True`` raises,
    with :data:`OUTSIDE` in the message.
    """
    # Loading the compiler takes seconds; a process that has compiled anything has loaded it.
    if "torch._dynamo" not in sys.modules:
        return function
    from torch._C._dynamo.eval_frame import get_eval_frame_callback, set_eval_frame
    from torch._dynamo.eval_frame import skip_code

    disabled: Any = None

    def call(*args: Any, **kwargs: Any) -> Any:
        """Call the function; where a caller is compiled, outside of its graph."""
        nonlocal disabled
        if get_eval_frame_callback() is None:  # no caller is compiled
            return function(*args, **kwargs)
        if disabled is None:
            disabled = torch.compiler.disable(function, reason=OUTSIDE)
        result = disabled(*args, **kwargs)
        if torch._C._len_torch_function_stack():
            # Compiled code goes past a function mode: what follows in the caller's region, until its end, is eager.
            set_eval_frame(None)
        return result

    skip_code(call.__code__)
    marks: Any = call
    marks._torchdynamo_disable, marks._torchdynamo_disable_msg = True, OUTSIDE
    return call


_autograd: Any = torch._C._autograd
_C: Any = torch._C


def _precision() -> str | list[str]:
    """Return the precision of products of float32 matrices, by the older name or by the newer ones."""
    try:
        older: str = _C._get_float32_matmul_precision()
        return older
    except RuntimeError:  # the newer ones were set
        return [_C._get_fp32_precision_getter(*names) for names in devices.PRECISIONS]


def _set_precision(precision: str | list[str]) -> None:
    if isinstance(precision, str):
        _C._set_float32_matmul_precision(precision)
        return
    for names, newer in zip(devices.PRECISIONS, precision, strict=True):
        _C._set_fp32_precision_setter(*names, newer)


_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    *(
        (getattr(_C, f"_get_{backend}_sdp_enabled"), getattr(_C, f"_set_sdp_use_{backend}"))
        for backend in ("flash", "mem_efficient", "math", "cudnn", "overrideable")
    ),
    (_C._get_sdp_priority_order, _C._set_sdp_priority_order),
    (torch.get_default_dtype, torch.set_default_dtype),
    (_precision, _set_precision),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (_C._get_cudnn_enabled, _C._set_cudnn_enabled),
    (_C._get_cudnn_benchmark, _C._set_cudnn_benchmark),
    (_C._get_cudnn_deterministic, _C._set_cudnn_deterministic),
)
"""What shows each setting of the process, and what sets it."""


@cache
def _settings_of(kind: str) -> tuple[Sequence[Callable[[], Any]], Sequence[Callable[[Any], object]]]:
    """Return what shows each setting, and what sets each, for a model on this kind of device: autocast comes first."""
    pairs = (
        (torch.is_autocast_enabled, torch.set_autocast_enabled),
        (torch.get_autocast_dtype, torch.set_autocast_dtype),
    )
    casts = [(partial(show, one), partial(put, one)) for one in dict.fromkeys(("cpu", kind)) for show, put in pairs]
    shown, put = zip(*casts, *_SETTINGS, strict=True)
    return shown, put


_FP8, _OLDER_FP8 = "transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8"


def _computes_in_fp8() -> bool:
    """Return whether TransformerEngine, where it is there, computes in eight bits: state of a class, of no thread."""
    modules = sys.modules
    module = modules.get(_FP8) or modules.get(_OLDER_FP8)
    return module is not None and bool(module.FP8GlobalStateManager.is_fp8_enabled())


_FIXED, _FIXED_SHOWN = zip(
    ("inference_mode", torch.is_inference_mode_enabled),
    ("a functorch transform", _C._are_functorch_transforms_active),
    ("disable_saved_tensors_hooks", _autograd._saved_tensors_hooks_is_enabled),
    ("DisableTorchFunctionSubclass", _C._is_torch_function_enabled),
    ("TransformerEngine's fp8_autocast", _computes_in_fp8),
    strict=True,
)
"""State that cannot be changed inside a running forward, and what shows each; so is the stream of a device."""


class ThreadState(NamedTuple):
    """Grad mode, autocast, saved-tensor hooks and modes of the thread, and torch's settings of the process.

    A switch between greenlets does not switch them: a forward that is suspended inside ``no_grad`` or ``autocast``
    would impose it on the code that runs next.
    """

    grad: bool
    hooks: tuple[tuple[Any, Any], ...]
    function_modes: tuple[Any, ...]
    dispatch_modes: tuple[Any, ...]
    kind: str
    """Of the model's device."""
    settings: list[Any]
    """Of each of :func:`_settings_of` this kind."""
    fixed: tuple[object, ...]
    """Of each of :data:`_FIXED`, and the device's stream."""

    @classmethod
    def capture(cls, device: torch.device) -> ThreadState:
        """Return the present state; ``device`` is the model's."""
        gpu, kind = devices.gpu_of(device), device.type
        return cls(
            torch.is_grad_enabled(),
            () if _autograd._top_saved_tensors_default_hooks(True) is None else _saved_tensor_hooks(),
            tuple(_get_current_function_mode_stack()) if _C._len_torch_function_stack() else (),
            tuple(_get_current_dispatch_mode_stack()) if _C._len_torch_dispatch_stack() else (),
            kind,
            [*map(call, _settings_of(kind)[0])],
            (*map(call, _FIXED_SHOWN), None if gpu is None else gpu.current_stream(device)),
        )

    @property
    def autocast(self) -> tuple[Any, ...]:
        """Whether it is on, and its dtype, for a CPU and for the model's device."""
        return tuple(self.settings[: 2 if self.kind == "cpu" else 4])

    def restore(self, now: ThreadState, name: str) -> None:
        """Set this state; ``now`` is the present one.

        ValueError, by the module's ``name``, for a state that cannot be set.
        """
        if self[1:] == now[1:] and not now.function_modes:  # as of most forwards, where they are suspended
            _C._set_grad_enabled(self.grad)
            return
        if self.fixed != now.fixed:
            names = *_FIXED, "another stream of the device"
            what = next(what for what, a, b in zip(names, self.fixed, now.fixed, strict=True) if a != b)
            raise ValueError(
                f"{name} exchanges rows inside {what}, which cannot be carried over a suspended forward; "
                "allowed around exchanges: no_grad, autocast, saved-tensor hooks, function and dispatch modes"
            )
        for _ in now.function_modes:  # first, since a mode is called for whatever is set
            _C._pop_torch_function_stack()
        _C._set_grad_enabled(self.grad)
        if self.hooks != now.hooks:
            for _ in now.hooks:
                _autograd._pop_saved_tensors_default_hooks()
            for pack, unpack in self.hooks:
                _autograd._push_saved_tensors_default_hooks(pack, unpack)
        if self.settings != now.settings:
            self._swap_settings(now)
        if self.dispatch_modes != now.dispatch_modes:
            for _ in now.dispatch_modes:
                _C._pop_torch_dispatch_stack(None)
            for mode in self.dispatch_modes:
                _C._push_on_torch_dispatch_stack(mode)
        for mode in self.function_modes:
            _C._push_on_torch_function_stack(mode)

    def _swap_settings(self, now: ThreadState) -> None:
        for put, wanted, found in zip(_settings_of(self.kind)[1], self.settings, now.settings, strict=True):
            if wanted != found:
                put(wanted)

    @contextmanager
    def applied(self, name: str, device: torch.device) -> Iterator[None]:
        """Run the body in this state."""
        outside = ThreadState.capture(device)
        self.restore(outside, name)
        torch.autocast_increment_nesting()
        try:
            yield
        finally:
            if torch.autocast_decrement_nesting() == 0:  # else cached casts of weights would outlive an update
                torch.clear_autocast_cache()
            outside.restore(self, name)


class KeepsThreadState:
    """A context that ends with the thread's state that it began with: a Ctrl-C may come while a forward changes it.

    Not a generator, which Python would finish when it collects it, perhaps inside a later step.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __enter__(self) -> None:
        self.state = ThreadState.capture(self.device)

    def __exit__(self, *_: object) -> None:
        now = ThreadState.capture(self.device)
        self.state._replace(fixed=now.fixed).restore(now, "a step")


def _saved_tensor_hooks() -> tuple[tuple[Any, Any], ...]:
    """Return the stack of (pack, unpack), outermost first; torch shows only its top."""
    stack = []
    while (top := _autograd._top_saved_tensors_default_hooks(True)) is not None:
        stack.append(top)
        _autograd._pop_saved_tensors_default_hooks()
    for pack, unpack in reversed(stack):
        _autograd._push_saved_tensors_default_hooks(pack, unpack)
    return tuple(reversed(stack))
