"""The model of the steps: built on the device, with balanced or real routing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_bench.context import Context
from overlap1f1b.kernels.choice import Choice
from overlap1f1b.moe import GroupedExperts, Router, set_auxiliary_scale
from overlap1f1b.running.transformer import MoEConfig, MoETransformer

Routing = Literal["balanced", "real"]


@contextmanager
def drawn_on_the_device() -> Iterator[None]:
    """Weights of experts are drawn where they are, not on the CPU one expert after another: seconds, not minutes."""
    own = GroupedExperts.reset_parameters

    @torch.no_grad()
    def reset(self: GroupedExperts, generator: torch.Generator | None = None, std: float = 0.02) -> None:
        for parameter in self.parameters():
            parameter.normal_(std=std)

    GroupedExperts.reset_parameters = reset  # type: ignore[method-assign]
    try:
        yield
    finally:
        GroupedExperts.reset_parameters = own  # type: ignore[method-assign]


@dataclass(frozen=True)
class Workload:
    """A model and the data of a step."""

    model: MoETransformer
    inputs: Tensor
    target: Tensor
    microbatches: int

    def plain_step(self) -> None:
        """Run forward and backward of every microbatch without an engine."""
        count = self.microbatches
        set_auxiliary_scale(self.model, 1 / count)
        for x, y in zip(self.inputs.chunk(count), self.target.chunk(count), strict=True):
            (loss_fn(self.model(x), y) / count).backward()

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.inputs.numel()

    @property
    def options(self) -> dict[str, Any]:
        """What a table says of it."""
        c = self.model.config
        return {
            name: getattr(c, name) for name in ("layers", "hidden", "heads", "intermediate", "experts", "top_k")
        } | {
            "microbatches": self.microbatches,
            "tokens_per_microbatch": self.tokens // self.microbatches,
        }


def build(
    context: Context,
    layers: int,
    *,
    routing: Routing = "balanced",
    overhead: bool = False,
    small: bool = False,
    kernels: Choice = "auto",
) -> Workload:
    """Experts half as wide as the model, four a token. With ``overhead`` half this width and a quarter of the rows, so
    that operations are as short as their launches."""
    if context.tiny or small:
        config = MoEConfig(vocabulary=32, layers=layers, hidden=16, heads=2, experts=4, intermediate=8, sequence=9)
        microbatches, batch = 3, 1
    else:
        hidden, top_k = (2048, 2) if overhead else (4096, 4)
        config = MoEConfig(
            vocabulary=4096, layers=layers, hidden=hidden, heads=hidden // 128, experts=16, top_k=top_k,
            intermediate=2048, sequence=4096,
        )  # fmt: skip
        microbatches, batch = 8, 1 if overhead else 2
    config = replace(config, kernels=kernels, force_load_balance=routing == "balanced")
    torch.manual_seed(0)
    with drawn_on_the_device():
        model = MoETransformer(config, dtype=context.dtype, device=context.device)
    if routing == "real":  # scores of one sixteenth, moved apart until the largest load is a few times the mean
        noise = torch.randn(config.experts, generator=torch.Generator().manual_seed(1))
        for router in (module for module in model.modules() if isinstance(module, Router)):
            router.correction_bias.copy_(0.02 * noise)
    generator = torch.Generator().manual_seed(0)
    shape = (microbatches * batch, config.sequence + 1)
    text = torch.randint(config.vocabulary, shape, generator=generator).to(context.device)
    return Workload(model, text[:, :-1].contiguous(), text[:, 1:].contiguous(), microbatches)


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy."""
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())
