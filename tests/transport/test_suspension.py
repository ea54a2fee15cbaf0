"""What a suspended forward must not let out, and what it must keep."""

import contextlib
import contextvars
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from greenlet import greenlet
from torch import Tensor, nn
from torch.backends import cuda, cudnn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from overlap1f1b.engine import Engine, EngineOptions
from overlap1f1b.plan import Overlap
from overlap1f1b.play.install import Installation
from overlap1f1b.schedule import build_schedule
from overlap1f1b.transport.suspension import Forward, Stack, ThreadState
from tests import models
from tests.engine import test_engine
from tests.engine.test_engine import COSTS, OVERLAPS, overlaps_of, programs

step = partial(test_engine.step, verify=False)  # these tests count what a step calls
VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("VARIABLE", default="outside")


class Doubling(TorchFunctionMode):
    """Doubles every sigmoid: whoever runs under it by mistake computes something else."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return 2 * result if func in (torch.tanh, torch.sigmoid) else result


class Counting(TorchDispatchMode):
    """Adds one to what every tanh gives."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result + 1 if func is torch.ops.aten.tanh.default else result


def bfloat16_autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def halved_saves() -> AbstractContextManager[Any]:
    """What is saved inside comes back halved, so that anything else saved under these hooks is wrong."""
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t * 0.5 if t.is_floating_point() else t)


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": bfloat16_autocast,
    "modes": lambda: _together(Doubling(), Counting()),
    "no_grad": torch.no_grad,
    "all": lambda: _together(bfloat16_autocast(), halved_saves(), Doubling(), Counting()),
}


@contextlib.contextmanager
def _together(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


class Wrapped(models.Block):
    """Enters a context around its experts, and computes inside it, before and after."""

    context: Callable[[], AbstractContextManager[Any]]

    def around(self, experts: nn.Module, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        with self.context():
            before = torch.tanh(tokens * 1.5)
            y = experts(tokens, indices, weights)
            after = torch.tanh(self.mix(tokens) * 0.5) * y.mean()
        return before + y + after.to(y.dtype) + torch.sigmoid(tokens)


@pytest.mark.parametrize(
    ("name", "every"), [*((name, False) for name in CONTEXTS), pytest.param("all", True, marks=pytest.mark.wide)]
)
def test_a_context_around_experts_reaches_no_other_microbatch(name: str, every: bool) -> None:
    block = type("Block", (Wrapped,), {"context": staticmethod(CONTEXTS[name])})
    data, reference = models.batch(4), dict[str, Tensor]()
    for number, program in enumerate(programs(4)):
        for overlap in overlaps_of(number, every):
            model = models.build(block=block)
            step(model, program, overlap, data)
            found = models.gradients(model)
            reference = reference or found
            assert not models.equal(found, reference), (name, program.name, overlap)
    if name == "all":
        return  # halving also what the exchange around the experts saves is what plain autograd does, not the engine
    _, expected = models.plain_gradients(models.build(block=block), *data, 4)
    problems = models.apart(reference, expected, 0, 1, 3e-2 if name == "autocast" else 1e-5)
    assert not problems, problems


def test_a_context_variable_is_seen_inside_and_not_outside() -> None:
    seen: list[str] = []

    class Sets(models.Block):
        def around(self, experts: nn.Module, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
            seen.append(VARIABLE.get())
            token = VARIABLE.set("inside")
            y = experts(tokens, indices, weights)
            seen.append(VARIABLE.get())
            VARIABLE.reset(token)
            return y

    VARIABLE.set("step")
    step(models.build(block=Sets), programs(3)[2], 3, models.batch(3))
    assert set(seen[::1]) == {"step", "inside"}
    assert seen.count("step") == seen.count("inside") == 6
    assert VARIABLE.get() == "step"


@contextlib.contextmanager
def settings() -> Iterator[None]:
    """Torch's settings of the process, as a model may set them around its layers."""
    dtype, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    deterministic = torch.get_deterministic_debug_mode()
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True), cudnn.flags(enabled=False):
        torch.set_default_dtype(torch.float64)
        torch.set_float32_matmul_precision("medium")
        torch.set_deterministic_debug_mode("warn")
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            torch.set_float32_matmul_precision(precision)
            torch.set_deterministic_debug_mode(deterministic)


@contextlib.contextmanager
def newer_precision() -> Iterator[None]:
    """The precision of products, by its newer name, after which the older one cannot be read."""
    cuda.matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        cuda.matmul.fp32_precision = "ieee"


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("context", [settings, newer_precision])
def test_settings_of_the_process_are_a_forwards_own(context: Any, overlap: Overlap) -> None:
    seen, device = list[Any](), torch.device("cpu")

    class Sets(models.Block):
        def around(self, experts: nn.Module, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
            outside = ThreadState.capture(device).settings
            with context():
                inside = ThreadState.capture(device).settings
                y = experts(tokens, indices, weights)
                seen.append((outside, inside, ThreadState.capture(device).settings))
            return y

    before = ThreadState.capture(device).settings
    step(models.build(block=Sets), programs(4)[2], overlap, models.batch(4))
    assert ThreadState.capture(device).settings == before
    assert len(seen) == 8
    for outside, inside, behind in seen:
        assert outside == before != inside == behind


@pytest.mark.parametrize("context", [torch.inference_mode, torch._C.DisableTorchFunctionSubclass])
def test_a_context_that_cannot_be_carried_is_refused_by_name(context: Any) -> None:
    block = type("Block", (Wrapped,), {"context": staticmethod(context)})
    with pytest.raises(ValueError, match="exchanges rows inside"):
        step(models.build(block=block), programs(2)[1], 2, models.batch(2))
    assert not torch.is_inference_mode_enabled()


def test_eight_bits_of_transformer_engine_are_refused_around_an_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are state of a class there, which other microbatches would compute with; around a step they are the same."""

    class State:
        enabled = False

        @classmethod
        def is_fp8_enabled(cls) -> bool:
            return cls.enabled

    @contextlib.contextmanager
    def fp8_autocast() -> Iterator[None]:
        State.enabled = True
        try:
            yield
        finally:
            State.enabled = False

    stand_in = SimpleNamespace(FP8GlobalStateManager=State)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.fp8", stand_in)  # type: ignore[misc]
    block = type("Block", (Wrapped,), {"context": staticmethod(fp8_autocast)})
    with pytest.raises(ValueError, match=r"exchanges rows inside TransformerEngine's fp8_autocast, which cannot be"):
        step(models.build(block=block), programs(2)[1], 2, models.batch(2))
    assert not State.enabled
    with fp8_autocast():
        step(models.build(), programs(2)[1], 2, models.batch(2))


class Failing(models.Block):
    """Raises in one microbatch, behind the experts, with a context open."""

    calls = 0

    def around(self, experts: nn.Module, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        with torch.no_grad(), bfloat16_autocast():
            y = experts(tokens, indices, weights)
            type(self).calls += 1
            if type(self).calls == 4:
                raise ArithmeticError("planted")
        return y + tokens


class Erring(models.Block):
    """Has torch make an error behind its exchanges: torch then walks the stack on which the forward runs."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            torch.mm(x[0], x[0])
        return y


@pytest.mark.parametrize(("overlap", "open_at_once"), [("serial", 1), (3, 3)])
def test_forwards_of_a_step_share_stacks(monkeypatch: pytest.MonkeyPatch, overlap: Overlap, open_at_once: int) -> None:
    made: list[Stack] = []
    create = Stack.__init__

    def count(stack: Stack) -> None:
        made.append(stack)
        create(stack)

    monkeypatch.setattr(Stack, "__init__", count)
    model, data = models.build(block=Erring), models.batch(6)
    engine, _ = step(model, build_schedule("combined_1f1b", microbatches=6), overlap, data)
    assert 1 <= len(made) <= open_at_once  # of twelve forwards
    engine.evaluate(data[0], target=data[1])
    assert all(stack.dead for stack in made)  # they end with the step


def test_a_stack_keeps_nothing_of_a_forward_that_has_ended() -> None:
    device, stacks = torch.device("cpu"), list[Stack]()
    forward = Forward(lambda x: forward.suspend(x + 1) * 2, "a block", device, stacks)
    x, y = torch.ones(3), torch.ones(3)
    given, sent = weakref.ref(x), weakref.ref(y)
    assert forward.start((x,), ThreadState.capture(device), grad=False).tolist() == [2, 2, 2]
    del x
    assert forward.resume(y, ThreadState.capture(device)).tolist() == [2, 2, 2]
    del y
    assert given() is None
    assert sent() is None
    (stack,) = stacks
    stack.end()
    assert stack.dead


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_an_exception_leaves_no_greenlet_thread_or_context_behind(overlap: Any) -> None:
    Failing.calls = 0
    model, data = models.build(block=Failing), models.batch(4)
    attributes = {n: sorted(m.__dict__) for n, m in model.named_modules()}
    random_state, threads = torch.get_rng_state(), threading.active_count()
    engine = Engine(model, programs(4)[3], loss_fn=models.loss_fn, options=EngineOptions(overlap=overlap, costs=COSTS))
    with pytest.raises(ArithmeticError, match="planted"):
        engine.step(data[0], target=data[1])
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.equal(torch.get_rng_state(), random_state)
    assert {n: sorted(m.__dict__) for n, m in model.named_modules()} == attributes
    assert threading.active_count() == threads
    del engine
    gc.collect()
    assert not [g for g in gc.get_objects() if isinstance(g, Stack) and not g.dead and g]
    assert isinstance(greenlet.getcurrent(), greenlet)
    for parameter in model.parameters():  # and the next step is right
        parameter.grad = None
    step(model, programs(4)[3], overlap, data)
    _, expected = models.plain_gradients(models.build(block=Failing), *data, 4)
    assert not models.equal(models.gradients(model), expected)


def test_hooks_fire_once_a_microbatch_with_the_whole_gradient() -> None:
    data, fired, seen = models.batch(3), list[str](), list[Tensor]()

    class Hooked(models.Block):
        def around(self, experts: nn.Module, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
            y = experts(tokens, indices, weights) * 1.0
            y.register_hook(seen.append)
            return y

    def hooked() -> nn.Sequential:
        model = models.build(block=Hooked)
        fired.clear()
        seen.clear()
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: fired.append(name))
            parameter.register_hook(lambda g: 2 * g)
        return model

    _, expected = models.plain_gradients(hooked(), *data, 3)
    wanted = sorted(fired), len(seen)
    for overlap in OVERLAPS:
        model = hooked()
        step(model, programs(3)[1], overlap, data)
        assert (sorted(fired), len(seen)) == wanted
        assert not models.equal(models.gradients(model), expected)


def test_experts_called_outside_a_step_compute_plainly() -> None:
    model = models.build()
    inputs, target = models.batch(1)
    engine = Engine(model, build_schedule("sequential", microbatches=1), loss_fn=models.loss_fn)
    with Installation(engine.stages[0]).on_modules():
        inside = models.loss_fn(model(inputs), target)
    assert torch.equal(inside, models.loss_fn(model(inputs), target))


def test_forwards_are_suspended_while_another_thread_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)  # of the process
    assert torch.compiler.is_compiling()
    model = models.build()
    step(model, build_schedule("combined_1f1b", microbatches=2), 3, models.batch(2))
    _, expected = models.plain_gradients(models.build(), *models.batch(2), 2)
    assert not models.equal(models.gradients(model), expected)
