"""What a forward keeps on modules between exchanges goes with its microbatch; what it only leaves there is common."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b.engine.run.attributes import ModuleAttributes
from overlap1f1b.moe import GroupedExperts
from overlap1f1b.transport.calls import exchange
from tests.engine.run.plain import HIDDEN, MICROBATCHES, STEPS, compare
from tests.ranks import Ranks


class Dispatcher:
    """An object that is no module; it sends the rows of a microbatch in an order of its own, and back."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.order: Tensor | None = None

    def dispatch(self, rows: Tensor) -> Tensor:
        self.order = rows.detach()[:, 0].argsort()
        self.scale = rows.mean(-1, keepdim=True)
        return exchange(rows[self.order], None, None, self.group)

    def combine(self, rows: Tensor) -> Tensor:
        assert self.order is not None
        back = torch.empty_like(self.order)
        back[self.order] = torch.arange(len(back))
        self.order = None
        return exchange(rows, None, None, self.group)[back] * self.scale


class Keeping(nn.Module):
    """Keeps an auxiliary loss, a mean and its dispatcher's order on modules; counts its calls."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.dispatcher, self.calls, self.seen = Dispatcher(group), 0, 0
        self.register_buffer("last", torch.zeros(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.a(x)
        self.b.auxiliary = h.square().mean()  # type: ignore[assignment]
        self.last = h.detach().mean(0)
        y = self.dispatcher.dispatch(h)
        z = self.dispatcher.combine(self.b(y))
        self.seen += len(x)
        return x + z * self.last + self.b.auxiliary


def _own(rank: int, size: int) -> list[str]:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    group, models = mesh.get_group("ep"), list[nn.Sequential]()

    def build() -> nn.Sequential:
        models.append(nn.Sequential(Keeping(group), Keeping(group)))
        return models[-1]

    problems = []
    for recompute in ("none", "block"):
        problems += compare(f"recompute {recompute}", build, mesh, recompute=recompute)
    counted = [(block.calls, block.seen) for block in models[1]]
    wanted = (STEPS + 1) * MICROBATCHES  # with the evaluation
    return problems + [f"counted {counted}"] * (counted != [(wanted, wanted * 6)] * 2)


def test_two_ranks(ranks2: Ranks) -> None:
    assert ranks2.run(_own, timeout=60) == [[], []]


class KeepingExperts(nn.Module):
    """Keeps its gate's weights on itself while the experts run."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(HIDDEN, 4), GroupedExperts(4, HIDDEN, 8, group=group)
        self.experts.reset_parameters(torch.Generator().manual_seed(1), std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        self.weights, indices = self.gate(x).softmax(-1).topk(2)
        y = self.experts(x, indices, torch.ones_like(self.weights))
        return x + y * self.weights.sum(-1, keepdim=True)


def _experts(rank: int, size: int) -> list[str]:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    group = mesh.get_group("ep")
    return compare("experts", lambda: nn.Sequential(KeepingExperts(group), KeepingExperts(group)), mesh)


def test_experts_on_two_ranks(ranks2: Ranks) -> None:
    assert ranks2.run(_experts, timeout=60) == [[], []]


def test_a_block_that_keeps_nothing_costs_nothing() -> None:
    block = nn.Linear(2, 2)
    attributes = ModuleAttributes(block)
    attributes.begin(None)
    assert attributes.leave() == {}
    attributes.begin(None)
    block.late = 1  # type: ignore[assignment]
    assert list(attributes.leave().values()) == [1]
    assert attributes.known
