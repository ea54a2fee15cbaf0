"""AdamW, and its learning rate as a function of the step."""

from __future__ import annotations

import math

import torch
from torch import nn

WARMUP = 0.1  # of the steps
FLOOR = 0.1  # of the peak, at the last step
BETAS = (0.9, 0.95)


def build_optimizer(model: nn.Module, *, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW that decays matrices alone: no embedding, and nothing of one dimension."""
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in model.parameters():
        groups[parameter.dim() > 1 and parameter not in embeddings].append(parameter)
    return torch.optim.AdamW(
        [
            {"params": parameters, "weight_decay": weight_decay if decayed else 0.0}
            for decayed, parameters in groups.items()
        ],
        lr=lr,
        betas=BETAS,
        fused=True,
    )


def set_weight_decay(optimizer: torch.optim.AdamW, weight_decay: float) -> None:
    """Of the group of matrices: a run that resumes may have another than the one that was saved."""
    decayed, _ = optimizer.param_groups
    decayed["weight_decay"] = weight_decay


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Of the step with this index: a linear warm-up to ``peak``, then a cosine down to a tenth of it.

    A function of its arguments alone, so that a resumed run needs no state.

    >>> [round(learning_rate(step, 100, 1.0), 2) for step in (0, 9, 55, 99)]
    [0.1, 1.0, 0.54, 0.1]
    """
    warmup = max(1, round(WARMUP * steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step + 1 - warmup) / max(1, steps - warmup)
    return peak * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr
