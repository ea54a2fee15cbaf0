"""Which implementation an op takes: its torch twin, or the Triton kernel of the same name."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, ParamSpec, TypeVar, get_args

import torch
from torch import Tensor, nn

P = ParamSpec("P")
T = TypeVar("T")
Choice = Literal["auto", "triton", "torch"]
"""``"torch"`` and ``"triton"`` are what they say; ``"auto"`` times both once for each op and class of shapes."""

WIDTHS = (torch.float32, torch.bfloat16, torch.float16)
"""Floating dtypes that Triton's kernels take; anything else is the twin's."""
TIE = 1.05  # what is about as fast is Triton's, so that noise decides less often
ROUNDS = 5  # timed runs of each implementation, after one that compiles and warms up


class Kernels:
    """Runs each op by its torch twin or by the Triton kernel beside it.

    >>> kernels = Kernels()  # times both on a GPU, the first time it meets an op with shapes of a class
    >>> taken = kernels(take_rows, rows, index)
    >>> kernels = Kernels("torch")  # or "triton"

    An op is a function of a module in this folder, its twin. Triton's has the same name and arguments and stands in the
    module of the same name in ``kernels/triton``. An op whose name ends in ``_`` adds to its first argument.

    A choice once made holds as long as the object, so that what an engine computes does not change under way. Shapes
    are of a class whose first sizes have the same number of bits and whose other sizes are equal: row counts that vary
    from batch to batch are timed a few times in all. Ranks may choose otherwise than each other, without harm: an op
    exchanges nothing, the places of rows are integers and the same either way, and sums differ by rounding alone. Where
    two models are to have the same bits, they share one object, or have the same ``choice`` but for ``"auto"``.

    The twin runs where there is no Triton, on a CPU (but with ``"triton"`` under ``TRITON_INTERPRET=1``, for tests),
    for float64, and with ``"auto"`` for what is empty.

    Args:
        choice: See :data:`Choice`.

    Attributes:
        chosen: What ``"auto"`` found, by op and class of shapes.

    Raises:
        ValueError: Another choice; ``"triton"`` without the package; when run, ``"triton"`` on a CPU.
    """

    def __init__(self, choice: Choice = "auto") -> None:
        if choice not in get_args(Choice):
            raise ValueError(f"kernels={choice!r}; allowed: {', '.join(map(repr, get_args(Choice)))}")
        self._has_triton = find_spec("triton") is not None
        if choice == "triton" and not self._has_triton:
            raise ValueError("kernels='triton' without the package triton; allowed: 'auto', 'torch'")
        self.choice = choice
        self.chosen: dict[tuple[object, ...], Literal["triton", "torch"]] = {}

    def __call__(self, op: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        assert not kwargs, "what tells shapes apart is positional"
        return (triton_of(op) if self.uses_triton(op, *args) else op)(*args, **kwargs)

    def uses_triton(self, op: Callable[..., Any], *args: Any) -> bool:
        """Whether this op, with arguments like these, is Triton's; with ``"auto"`` times it if need be."""
        if self.choice == "torch":
            return False
        tensors = [tensor for arg in args for tensor in _tensors(arg)]
        if not tensors[0].is_cuda:
            return self.choice == "triton" and _interpreted()
        if not self._has_triton or any(t.is_floating_point() and t.dtype not in WIDTHS for t in tensors):
            return False
        return self.choice == "triton" or self._measured(op, args, tensors)

    def _measured(self, op: Callable[..., Any], args: tuple[Any, ...], tensors: list[Tensor]) -> bool:
        key = (op.__name__, tensors[0].device.index, *map(_described, args))
        if key not in self.chosen:
            if not all(t.numel() for t in tensors):
                return False
            if torch.cuda.is_current_stream_capturing():
                return True  # a capture cannot be timed, and the twins may look at values
            with torch.cuda.device_of(tensors[0]):  # whose stream the events are on
                self.chosen[key] = _faster(op, args)
        return self.chosen[key] == "triton"


def use_kernels(model: nn.Module, kernels: Kernels | Choice) -> None:
    """Has every module of a model run by these kernels, its layers choosing together.

    >>> use_kernels(model, "triton")
    """
    shared = kernels if isinstance(kernels, Kernels) else Kernels(kernels)
    for module in model.modules():
        if isinstance(getattr(module, "kernels", None), Kernels):
            module.__dict__["kernels"] = shared


def run(kernels: Kernels | None, op: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The op by these kernels; by its twin without any."""
    return op(*args, **kwargs) if kernels is None else kernels(op, *args, **kwargs)


def _interpreted() -> bool:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return True
    raise ValueError("kernels='triton' on a CPU; allowed: 'auto', 'torch', or TRITON_INTERPRET=1 for tests")


def triton_of(op: Callable[P, T]) -> Callable[P, T]:
    """The Triton function of the same name and arguments as a twin; needs the package."""
    package, _, module = op.__module__.rpartition(".")
    function: Callable[P, T] = getattr(import_module(f"{package}.triton.{module}"), op.__name__)
    return function


def _tensors(arg: Any) -> tuple[Tensor, ...]:
    if isinstance(arg, Tensor):
        return (arg,)
    return tuple(t for t in arg if isinstance(t, Tensor)) if isinstance(arg, tuple) else ()


def _described(arg: Any) -> object:
    """What tells classes of shapes apart: sizes, dtypes and numbers, the first size of a tensor by its bits."""
    if isinstance(arg, Tensor):
        rows, *rest = arg.shape
        return arg.dtype, rows.bit_length(), *rest
    return tuple(map(_described, arg)) if isinstance(arg, tuple) else arg


def _faster(op: Callable[..., Any], args: tuple[Any, ...]) -> Literal["triton", "torch"]:
    if op.__name__.endswith("_"):
        args = (args[0].clone(), *args[1:])
    with torch.no_grad():
        try:
            triton = _milliseconds(triton_of(op), args)
        except Exception as error:  # too large for this GPU's registers or shared memory, or a compiler's fault
            warnings.warn(f"{op.__name__} runs by torch, since Triton's kernel fails: {error}", stacklevel=2)
            return "torch"
        return "triton" if triton < TIE * _milliseconds(op, args) else "torch"


def _milliseconds(function: Callable[..., Any], args: tuple[Any, ...]) -> float:
    """The shortest of a few runs on the current stream."""
    function(*args)
    times = []
    for _ in range(ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function(*args)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times)
