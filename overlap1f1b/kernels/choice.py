"""Choice of an op's implementation: its torch twin, or the Triton kernel of the same name."""

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn

T = TypeVar("T")
Choice = Literal["auto", "triton", "torch"]
"""Implementation of ops; ``"auto"`` times both once for each op and class of shapes, and takes the faster."""

WIDTHS = (torch.float32, torch.bfloat16, torch.float16)
"""Floating dtypes that Triton's kernels take; other dtypes run by the twin."""
TIE = 1.05  # Triton is taken if it is about as fast, so that noise decides less often
ROUNDS = 5  # timed runs of each implementation, after one that compiles and warms up


class Kernels:
    """A runner of ops, by the torch twin or by Triton.

    >>> kernels = Kernels()  # on a GPU, times both for each new op and class of shapes
    >>> taken = kernels(take_rows, rows, index)
    >>> kernels = Kernels("torch")  # or "triton"

    An op is a function of a module in this folder, its twin. Triton's function has the same name and arguments and is
    in the module of the same name in ``kernels/triton``. An op whose name ends in ``_`` adds to its first argument.

    A choice lasts as long as the object, so an engine's results do not change during training. Shapes are in one class
    if all sizes but the first are equal, whatever the number of rows is. A new class is timed, and its kernel compiled,
    only while the object is :attr:`open`: an :class:`~overlap1f1b.engine.Engine` closes it at the end of its first
    step, so that no later step compiles or waits; a class that is new then runs by the twin. Two models are bit-equal
    if they share one object, or have the same ``choice`` other than ``"auto"``. docs/kernels.md says why ranks may
    choose differently, but not in a tensor group.

    The twin runs without the package triton, on a CPU (except with ``"triton"`` and ``TRITON_INTERPRET=1``, for tests),
    for float64, and with ``"auto"`` for empty tensors.

    Args:
        choice: See :data:`Choice`.

    Attributes:
        chosen: Choices of ``"auto"``, by op and class of shapes.
        open: Whether ``"auto"`` times a new class.

    Raises:
        ValueError: The choice is unknown, or is ``"triton"`` without the package; when an op runs, ``"triton"`` on a
            CPU.
    """

    def __init__(self, choice: Choice = "auto") -> None:
        if choice not in get_args(Choice):
            raise ValueError(f"kernels={choice!r}; allowed: {', '.join(map(repr, get_args(Choice)))}")
        self._has_triton = find_spec("triton") is not None
        self._interprets = os.environ.get("TRITON_INTERPRET") == "1"
        if choice == "triton" and not self._has_triton:
            raise ValueError("kernels='triton' without the package triton; allowed: 'auto', 'torch'")
        self.choice, self.open = choice, True
        self.chosen: dict[tuple[object, ...], Literal["triton", "torch"]] = {}

    def __call__(self, op: Callable[..., T], *args: Any) -> T:
        run: Callable[..., T] = triton_of(op) if self.uses_triton(op, *args) else op
        return run(*args)

    def uses_triton(self, op: Callable[..., Any], *args: Any) -> bool:
        """Return whether Triton runs ``op`` with such arguments.

        ``"auto"`` times both if arguments of this class are new, and keeps in ``chosen`` which was the faster.
        """
        if self.choice == "torch" or not self._has_triton:
            return False
        if not args[0].is_cuda:
            if self.choice == "triton" and not self._interprets:
                raise ValueError("kernels='triton' on a CPU; allowed: 'auto', 'torch', or TRITON_INTERPRET=1 for tests")
            return self.choice == "triton"
        # The class of shapes: dtypes and sizes, without numbers that may follow from rows.
        described = [
            (arg.dtype, arg.shape[1:]) if isinstance(arg, Tensor) else None if type(arg) is int else arg for arg in args
        ]
        key = (op.__name__, args[0].get_device(), *described)
        if key not in self.chosen:
            tensors = [arg for arg in args if isinstance(arg, Tensor)]
            if any(t.is_floating_point() and t.dtype not in WIDTHS for t in tensors):
                return False
            if self.choice == "triton":
                return True
            if not self.open or not all(t.numel() for t in tensors):
                return False
            self.chosen[key] = _faster(op, args)
        return self.chosen[key] == "triton"


def use_kernels(model: nn.Module, kernels: Kernels | Choice) -> None:
    """Let every module of a model use these kernels, with one choice for all layers.

    >>> use_kernels(model, "triton")
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"use_kernels of a {type(model).__name__}; allowed: a module, as nn.ModuleList(blocks)")
    shared = kernels if isinstance(kernels, Kernels) else Kernels(kernels)
    for module in model.modules():
        if isinstance(getattr(module, "kernels", None), Kernels):
            module.__dict__["kernels"] = shared


@contextmanager
def choosing(models: Iterable[nn.Module]) -> Iterator[None]:
    """Let the kernels of these models choose in the body, and never after it."""
    held = _kernels_of(models)
    for kernels in held:
        kernels.open = True
    try:
        yield
    finally:
        for kernels in held:
            kernels.open = False


def choose_nothing(models: Iterable[nn.Module]) -> None:
    """Let ``"auto"`` of these models' kernels be torch, whatever they have chosen before."""
    for kernels in _kernels_of(models):
        kernels.open = False
        kernels.chosen.clear()


def _kernels_of(models: Iterable[nn.Module]) -> list[Kernels]:
    found = [getattr(module, "kernels", None) for model in models for module in model.modules()]
    return [kernels for kernels in found if isinstance(kernels, Kernels)]


@cache
def triton_of(op: Callable[..., Any]) -> Callable[..., Any]:
    """Return the Triton function of a twin; needs the package triton."""
    package, _, module = op.__module__.rpartition(".")
    function: Callable[..., Any] = getattr(import_module(f"{package}.triton.{module}"), op.__name__)
    return function


def _faster(op: Callable[..., Any], args: tuple[Any, ...]) -> Literal["triton", "torch"]:
    """Return which of an op's kernels is the faster for these arguments."""
    if op.__name__.endswith("_"):
        args = (args[0].clone(), *args[1:])
    with torch.no_grad():
        try:
            triton = _milliseconds(triton_of(op), args)
        except Exception as error:  # too large for this GPU, or an error of the compiler
            warnings.warn(f"{op.__name__} runs by torch, since Triton's kernel fails: {error}", stacklevel=2)
            return "torch"
        return "triton" if triton < TIE * _milliseconds(op, args) else "torch"


def _milliseconds(function: Callable[..., Any], args: tuple[Any, ...]) -> float:
    """Return the shortest time of a few runs on the current stream of their device."""
    gpu, times = torch.get_device_module(args[0].device), []
    with gpu.device(args[0].device):
        function(*args)
        for _ in range(ROUNDS):
            start, end = gpu.Event(enable_timing=True), gpu.Event(enable_timing=True)
            start.record()
            function(*args)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
    return min(times)
