"""A Triton kernel against its twin, and the shapes that both are tried with."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from overlap1f1b.kernels.choice import Kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

SHAPES = [  # T, K, E, H: no rows, one, 1,000; experts without tokens; several blocks of columns
    (0, 2, 3, 30),
    (1, 8, 8, 1),
    (1, 1, 4, 257),
    (1000, 1, 7, 30),
    (30, 8, 100, 257),
    (3, 2, 4, 1100),
]
DTYPES = [torch.float32, torch.bfloat16]
CASES = [
    pytest.param(*shape, dtype, marks=[pytest.mark.wide] * ((at + number) % 2 == 0))
    for at, shape in enumerate(SHAPES)
    for number, dtype in enumerate(DTYPES)
]
"""Every shape with every dtype; in the first tier shapes and dtypes take turns."""


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def choose(T: int, K: int, E: int) -> Tensor:
    """``[T, K]``, K experts for each token, none of the first if there are others."""
    spare = 1 if E > K else 0
    return torch.rand(T, E - spare, device=DEVICE).argsort(-1)[:, :K] + spare


def check(op: Callable[..., Any], *args: Any, exact: bool = False, size: float = 1.0) -> None:
    """Triton's op gives what its twin gives: integers and, where asked, copies exactly, float32 sums to 1e-6 of the
    largest (or of ``size``, what they are drawn from), and bfloat16 the float32 result to one unit in the last place.

    A sum of n products of numbers that are drawn from 1 has the size √n, and may be nearly zero.
    """
    run, expected = partial(Kernels("triton"), op, *args), op(*(_wide(arg) for arg in args))
    every, twins = (x if isinstance(x, tuple) else (x,) for x in (run(), expected))
    if DEVICE == "cuda":  # where the second launch takes what the first has compiled
        again = run()
        assert all(map(_same, every, again if isinstance(again, tuple) else (again,)))
    assert len(every) == len(twins)
    for result, twin in zip(every, twins, strict=True):
        if twin is None:
            assert result is None
            continue
        assert result.shape == twin.shape
        low = result.dtype == torch.bfloat16
        assert result.dtype == twin.dtype or low
        if exact or not twin.is_floating_point():
            assert torch.equal(result, twin.to(result.dtype))
        elif twin.numel():
            allowed = torch.full_like(twin, 1e-6 * max(float(twin.abs().max()), size))
            if low:
                allowed += torch.ldexp(torch.ones_like(twin), torch.frexp(twin).exponent - 8)
            assert ((result.to(twin.dtype) - twin).abs() <= allowed).all(), float((result - twin).abs().max())


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b is None or torch.equal(a, b)  # type: ignore[arg-type]


def _wide(arg: Any) -> Any:
    return arg.float() if isinstance(arg, Tensor) and arg.dtype == torch.bfloat16 else arg
