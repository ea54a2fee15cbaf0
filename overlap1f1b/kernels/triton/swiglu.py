"""``silu(gate) · up · p`` in one pass, and its backward with the gradient of p."""

import triton.language as tl
from torch import Tensor

from overlap1f1b.kernels.triton.launch import SUMMED, kernel, tile


def swiglu_rows(gate_up: Tensor, weights: Tensor | None = None, count: Tensor | None = None) -> Tensor:
    """As :func:`overlap1f1b.kernels.swiglu.swiglu_rows`; a tensor that is not given has another's pointer, unread."""
    gate_up = gate_up.contiguous()
    R, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(R, size)
    BR, BI = tile(size)
    factors, limit = (out if weights is None else weights.contiguous()), (out if count is None else count)
    constants = size, weights is not None, count is not None, BR, BI
    _forward((-(-R // BR), -(-size // BI)), (gate_up, factors, limit, out), (R,), constants)
    return out


def swiglu_rows_backward(
    grad: Tensor, gate_up: Tensor, weights: Tensor | None = None, count: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """As :func:`overlap1f1b.kernels.swiglu.swiglu_rows_backward`; pointers as in the forward."""
    grad, gate_up = grad.contiguous(), gate_up.contiguous()
    R, size = grad.shape
    grads = gate_up.new_empty(gate_up.shape)
    grad_weights = None if weights is None else weights.new_empty(R)
    BR, BI = tile(size, most=SUMMED)
    factors, limit = (grads if weights is None else weights.contiguous()), (grads if count is None else count)
    tensors = grad, gate_up, factors, limit, grads, grads if grad_weights is None else grad_weights
    _backward((-(-R // BR), 1), tensors, (R,), (size, weights is not None, count is not None, BR, BI))
    return grads, grad_weights


@kernel("R")
def _forward(gate_up, weights, count, out, R, SIZE, WEIGHTED, COUNTED, BR, BI):
    """Compute a tile of the activation, times the rows' weights."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    column = tl.program_id(1) * BI + tl.arange(0, BI)
    inside = (row < R)[:, None] & (column < SIZE)[None, :]
    real = inside
    if COUNTED:
        real = inside & (row < tl.load(count))[:, None]
    place = gate_up + row[:, None] * (2 * SIZE) + column[None, :]
    gate = tl.load(place, mask=real, other=0.0, eviction_policy="evict_first").to(tl.float32)
    up = tl.load(place + SIZE, mask=real, other=0.0, eviction_policy="evict_first").to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    if WEIGHTED:
        y *= tl.load(weights + row, mask=row < R, other=0.0).to(tl.float32)[:, None]
        y = tl.where(real, y, 0.0)  # padding may hold anything
    tl.store(out + row[:, None] * SIZE + column[None, :], y.to(out.dtype.element_ty), mask=inside)


@kernel("R")
def _backward(grad, gate_up, weights, count, grads, grad_weights, R, SIZE, WEIGHTED, COUNTED, BR, BI):
    """Compute the gradients of whole rows and of their weights."""
    # A program has whole rows, so that it sums the gradient of a row's weight in a fixed order.
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    here = row < R
    real = here
    if COUNTED:
        real = here & (row < tl.load(count))
    if WEIGHTED:
        weight = tl.load(weights + row, mask=real, other=0.0).to(tl.float32)
        products = tl.zeros([BR, BI], dtype=tl.float32)
    for first in range(0, SIZE, BI):
        column = first + tl.arange(0, BI)
        across = (column < SIZE)[None, :]
        inside = real[:, None] & across
        place = row[:, None] * (2 * SIZE) + column[None, :]
        of_row = grad + row[:, None] * SIZE + column[None, :]
        g = tl.load(of_row, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        gate = tl.load(gate_up + place, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        up = tl.load(gate_up + place + SIZE, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        if WEIGHTED:
            products += g * silu * up
            g *= weight[:, None]
        grad_gate = g * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))  # d silu(x) = sigmoid(x) (1 + x (1 − sigmoid(x)))
        tl.store(grads + place, grad_gate.to(grads.dtype.element_ty), mask=here[:, None] & across)
        tl.store(grads + place + SIZE, (g * silu).to(grads.dtype.element_ty), mask=here[:, None] & across)
    if WEIGHTED:
        tl.store(grad_weights + row, tl.sum(products, 1).to(grad_weights.dtype.element_ty), mask=here)
