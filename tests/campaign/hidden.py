"""Cases of blocks that keep something in a random place: gradients are a plain loop's, or one line refuses the step.

Python offers more places than anybody can list. What is kept from before an exchange until behind it, for a later
block or for the backward, must not become another microbatch's without a word.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b.engine import Engine, EngineOptions
from overlap1f1b.learn.check import VerificationError
from overlap1f1b.moe import GroupedExperts
from overlap1f1b.schedule import build_schedule
from tests.campaign.compare import paused
from tests.campaign.draw import Hidden
from tests.campaign.places import PLACES, Get
from tests.engines import COSTS
from tests.models import gradients

HIDDEN, ROWS = 8, 5


class _Scaled(torch.autograd.Function):
    """Multiplies the gradient by what is kept when the backward comes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, get: Get) -> Tensor:
        ctx.get = get
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.get(), None


class Block(nn.Module):
    """Keeps a factor of each token, and applies it where ``when`` says; without a place it keeps nothing."""

    def __init__(self, group: Any, place: str, when: str) -> None:
        super().__init__()
        self.router, self.mix = nn.Linear(HIDDEN, 4), nn.Linear(HIDDEN, HIDDEN)
        self.experts = GroupedExperts(4, hidden=HIDDEN, intermediate=12, group=group)
        self.when, self.before = when, None
        self.put, self.get = PLACES[place](self) if place else (lambda x: None, lambda: torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        t = x + self.mix(x)
        self.put(t.detach().mean(-1, keepdim=True).sigmoid() + 0.5)
        w, i = self.router(t).softmax(-1).topk(2)
        if self.when == "backward":
            t = _Scaled.apply(t, self.get)
        y = self.experts(t, i, w)
        if self.when == "behind":
            y = y * self.get()
        elif self.when == "later" and self.before is not None:
            y = y * self.before()
        return x + y


def play(rank: int, size: int, case: Hidden) -> list[str]:
    """Return what is wrong without a word, or refused without a reason, on this rank."""
    piped = case.schedule == "dualpipev"
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("pp" if piped else "ep",))
    group, copies = (None, 1) if piped else (mesh.get_group("ep"), size)
    program = build_schedule(case.schedule, ranks=size if piped else 1, microbatches=case.microbatches)
    batch = torch.randn(
        2, case.microbatches * ROWS, HIDDEN, generator=torch.Generator().manual_seed(0 if piped else rank)
    )

    def build() -> nn.Sequential:
        torch.manual_seed(case.seed)
        blocks = [Block(group, case.place, case.when) for _ in range(case.layers)]
        for one, other in pairwise(blocks):
            other.before = one.get
        return nn.Sequential(*blocks)

    plain, model = build(), build()
    for x, y in zip(*(part.chunk(case.microbatches) for part in batch), strict=True):
        (_loss(plain(x), y) / (case.microbatches * copies)).backward()  # type: ignore[no-untyped-call]
    engine = Engine(
        model,
        program,
        mesh=mesh,
        loss_fn=_loss,
        options=EngineOptions(
            costs=COSTS, reduce=False, timeout=60, overlap=case.overlap, recompute=case.recompute, parts=case.parts
        ),
    )
    try:
        with paused(case, rank):
            engine.step(batch[0], target=batch[1])
    except VerificationError as error:
        return [] if case.place else [f"refused although nothing is kept: {error}"]
    mine = {str(number) for number, block in enumerate(model) if any(block in s.blocks for s in engine.stages.values())}
    found, wanted = gradients(model), gradients(plain)
    wrong = [
        name
        for name, grad in found.items()
        if name.split(".")[0] in mine and not torch.allclose(grad, wanted[name], rtol=1e-5, atol=1e-7)
    ]
    return [f"wrong without a word: {wrong[:2]}"] if wrong else []


def _loss(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).square().mean()
