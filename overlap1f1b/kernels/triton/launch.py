"""Tiles of kernels, and launches without what Triton looks up in each call."""

from collections.abc import Callable, Sequence
from functools import cache
from inspect import signature
from typing import Any

import torch
import triton
from torch import Tensor

TILE = 2048
"""Number of elements of a program: 16 for each of 128 threads, that is two loads of 16 bytes in bfloat16."""
SUMMED = 512
"""Number of columns of a program that sums along rows: one warp has a whole row, and its sum needs no shared memory."""
INTERPRETED_TILE = 1 << 16
"""The interpreter takes about a millisecond for a program, whatever its size."""
READ = ("3.6.", "3.7.")
"""Releases of Triton in whose code a launch, and what its compiled kernels depend on, are as :class:`Kernel` has it."""


@cache
def interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, which is decided when they are imported."""
    return bool(triton.knobs.runtime.interpret)


@cache
def tile(width: int, elements: int = TILE, most: int = TILE) -> tuple[int, int]:
    """Return rows and columns of a program, powers of two, that leave little of the last block of ``width`` empty.

    So 2,048 columns for 2,048, 1,024 for 7,168, 128 for 257, at most :data:`SUMMED` if it sums along rows; ``elements``
    in all.
    """
    most = min(triton.next_power_of_2(max(width, 1)), most)
    candidates = [columns for columns in (most, most // 2, most // 4, most // 8) if columns >= min(most, 128)]
    columns = min(candidates, key=lambda c: (triton.cdiv(width, c) * c, -c))
    return max((INTERPRETED_TILE if interpreted() else elements) // columns, 1), columns


wide = cache(triton.next_power_of_2)
"""The least power of two that is not below a number."""


def beside(rows: Tensor) -> Tensor:
    """Return ``rows`` with the elements of a row side by side; there may be gaps between rows."""
    return rows if rows.stride(1) == 1 else rows.contiguous()


class Kernel:
    """A kernel whose arguments are tensors, numbers of rows (int32, never specialised) and constants, in this order.

    Triton binds, specialises and looks for what it has compiled in each launch, in tens of microseconds of Python. What
    it compiles depends on the device, the tensors' dtypes, whether they begin at a multiple of 16 bytes, and the
    constants: the first launch with a new class of these is Triton's, and later ones call the launcher that it made.
    They call no hooks of Triton's profilers. Where a launch is not known to be so (another release than :data:`READ`,
    another device than the current one, no CUDA, a traced call), every one is Triton's.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self._ready: dict[tuple[object, ...], tuple[Any, ...]] = {}

    def __call__(
        self,
        grid: tuple[int, int],
        tensors: Sequence[Tensor],
        numbers: Sequence[int],
        constants: tuple[object, ...],
        **options: int,
    ) -> None:
        """Run on the device of the tensors, unless the grid is empty; ``options`` follow from the class."""
        if 0 in grid:
            return
        if torch.compiler.is_dynamo_compiling():  # dynamo traces launches of Triton's own form
            self.function[grid](*tensors, *numbers, *constants, **options)
            return
        device, places = tensors[0].get_device(), [tensor.data_ptr() for tensor in tensors]
        key = (device, constants, *[tensor.dtype for tensor in tensors], *[place % 16 == 0 for place in places])
        ready = self._ready.get(key)
        if ready is not None and device == torch._C._cuda_getDevice():
            run, function, metadata = ready
            stream = torch._C._cuda_getCurrentRawStream(device)
            run(*grid, 1, stream, function, metadata, None, None, None, *places, *numbers, *constants)
            return
        with torch.cuda.device_of(tensors[0]):
            made = self.function[grid](*tensors, *numbers, *constants, **options)
        if device >= 0 and made is not None and torch.version.hip is None and triton.__version__.startswith(READ):
            self._ready[key] = made.run, made.function, made.packed_metadata


def kernel(*numbers: str) -> Callable[[Callable[..., None]], Kernel]:
    """Return a decorator of a kernel's source; ``numbers`` are its arguments between the tensors and the constants.

    Constants are those in capitals.
    """

    def of(source: Any) -> Kernel:
        names = [name for name in signature(source).parameters if name.isupper() and name not in numbers]
        constants = dict.fromkeys(names, "constexpr")
        source.__annotations__ |= constants
        function = triton.jit(source, do_not_specialize=numbers)
        if interpreted():  # it runs a function that it makes of the source's text
            function.rewrite().__annotations__ |= constants
        return Kernel(function)

    return of
