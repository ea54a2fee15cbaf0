"""The scale of losses that Megatron-Core's layers attach to activations, which it keeps on classes of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor

from overlap1f1b.integrations.megatron.config import Config


class Scaler(NamedTuple):
    """A class of Megatron-Core that multiplies the gradient of an attached loss.

    Args:
        module: Where it is.
        name: Of the class.
        used: The field of the config that is set where the model has such losses.
        own_scale: The field that gives them a factor of their own, in place of ``grad_scale_func``.
        by_sequence: Whether ranks that share a sequence each have a part of the loss.
    """

    module: str
    name: str
    used: str
    own_scale: str = ""
    by_sequence: bool = True


MOE = Scaler(
    "megatron.core.transformer.moe.moe_utils", "MoEAuxLossAutoScaler", "num_moe_experts", "moe_grad_scale_func"
)
SCALERS = (
    MOE,
    Scaler(
        "megatron.core.transformer.multi_token_prediction",
        "MTPLossAutoScaler",
        "mtp_num_layers",
        "mtp_grad_scale_func",
        by_sequence=False,
    ),
    Scaler(
        "megatron.core.transformer.experimental_attention_variant.dsa",
        "DSAIndexerLossAutoScaler",
        "experimental_attention_variant",
    ),
)
_SCALE = "main_loss_backward_scale"


@contextmanager
def scaled(config: Config, scale_of: Callable[[Scaler], Tensor]) -> Iterator[None]:
    """While it lasts, attached losses have their scales; afterwards whatever was set before.

    A model with such losses has imported their classes: what is not imported is not needed, so nothing is imported.
    """
    before = []
    try:
        for scaler in SCALERS:
            held = getattr(sys.modules.get(scaler.module), scaler.name, None)
            if held is not None and getattr(config, scaler.used) is not None:
                before.append((held, getattr(held, _SCALE)))
                # Not by set_loss_scale, which may write into the tensor that is set.
                setattr(held, _SCALE, scale_of(scaler))
        yield
    finally:
        for held, scale in before:
            setattr(held, _SCALE, scale)
