"""Tensors that cross an exchange, in whatever call they are used: gradients equal to a plain loop, bit by bit."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b.transport.calls import exchange
from tests.engine.run.plain import HIDDEN, compare
from tests.ranks import Ranks

Body = Callable[["Block", Tensor, Callable[[Tensor], Tensor]], Tensor]


class Block(nn.Module):
    """Layers for a body that is given the block, its input, and an exchange."""

    def __init__(self, group: dist.ProcessGroup, body: Body) -> None:
        super().__init__()
        self.group, self.body = group, body
        self.a, self.b, self.c = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x, lambda rows: exchange(rows, None, None, self.group))


class Fills(torch.autograd.Function):
    """Takes tensors in a list and a dictionary, and puts another one into the list."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, filled: list[Tensor]) -> Tensor:
        filled.append(x.detach() * 2)
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


Pair = namedtuple("Pair", "first second")


def list_is_filled(s: Block, x: Tensor, ex: Callable[[Tensor], Tensor]) -> Tensor:
    h, filled = s.a(x), [torch.zeros(1)]
    y = Fills.apply(ex(h), filled)
    return ex(y) + filled[1]


def named_tuple(s: Block, x: Tensor, ex: Callable[[Tensor], Tensor]) -> Tensor:
    pair = Pair(s.a(x), s.b(x))
    y = ex(s.c(x))
    return torch.stack(pair).sum(0) + y


def kinds_of_torch(s: Block, x: Tensor, ex: Callable[[Tensor], Tensor]) -> Tensor:
    kept = s.a(x).topk(HIDDEN)
    y = ex(s.b(x))
    return torch.cat(kept[:1]) + torch.stack(list(OrderedDict(a=kept.values, b=y).values())).sum(0)


EQUAL: list[Body] = [list_is_filled, named_tuple, kinds_of_torch]


def _equal(rank: int, size: int, bodies: list[Body]) -> list[str]:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    return [
        problem
        for body in bodies
        for problem in compare(
            body.__name__,
            lambda body=body: nn.Sequential(Block(mesh.get_group("ep"), body)),  # type: ignore[misc]
            mesh,
        )
    ]


def test_two_ranks(ranks2: Ranks) -> None:
    assert ranks2.run(_equal, EQUAL, timeout=120) == [[], []]
