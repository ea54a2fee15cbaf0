"""Whether two rows of the benchmark computed the same gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def compare(grads: Sequence[Tensor], reference: Sequence[Tensor]) -> tuple[bool, float]:
    """Whether all are equal by ``torch.equal``, and the largest absolute difference.

    A NaN equals nothing, another NaN included: rows that all diverged have not been shown to agree. The difference is
    infinite where it is no finite number.
    """
    pairs = list(zip(grads, reference, strict=True))
    if all(torch.equal(a, b) for a, b in pairs):
        return True, 0.0
    largest = torch.stack([(a - b).abs().max().double() for a, b in pairs if a.numel()]).max().item()  # keeps a NaN
    return False, largest if math.isfinite(largest) else math.inf
