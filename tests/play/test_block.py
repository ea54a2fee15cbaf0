"""Routing weights inside the experts, through the engine: gradients, exchanges, memory."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b.schedule import build_schedule
from overlap1f1b.transport.exchange import build_exchange
from overlap1f1b.transport.loopback import LoopbackExchange
from tests import models
from tests.engine.test_engine import Delayed
from tests.engines import COSTS, Case, make, orders_apart
from tests.ranks import over

MICROBATCHES = 3
CASES: list[Case] = [
    ("sequential", "serial", {}),
    ("combined_1f1b", "pairs", {}),
    ("zb_h1", 3, {}),
    ("combined_1f1b", 3, {"recompute": "experts"}),
    ("combined_1f1b", 3, {"recompute": "block"}),
    ("combined_1f1b", 3, {"capacity": 2.0}),  # room for every row
]


@pytest.mark.parametrize("expert_calls", [1, pytest.param(2, marks=pytest.mark.wide)])
def test_one_rank(expert_calls: int) -> None:
    data = models.batch(MICROBATCHES)
    _, outside = models.plain_gradients(models.build(expert_calls=expert_calls), *data, MICROBATCHES)
    within: dict[str, Any] = {"expert_calls": expert_calls, "weights_in": "activation"}
    _, inside = models.plain_gradients(models.build(**within), *data, MICROBATCHES)
    assert not models.apart(inside, outside, 0, 1, 1e-5)
    reference: dict[str, Tensor] = {}
    for name, overlap, more in CASES:
        exchange, model = LoopbackExchange(torch.device("cpu")) if overlap == 3 else None, models.build(**within)
        program = build_schedule(name, microbatches=MICROBATCHES)  # type: ignore[arg-type]
        options = {"overlap": overlap, "costs": COSTS, "timeout": 20, "verify": False} | more
        make(model, program, exchange=exchange, **options).step(data[0], target=data[1])
        reference = reference or models.gradients(model)
        assert not models.equal(models.gradients(model), reference), (name, overlap, more)
    assert not (models.equal(reference, inside) if expert_calls == 1 else models.apart(reference, inside, 0, 1, 1e-5))


@over(2, timeout=120)
def test_two_ranks(rank: int, size: int) -> None:
    """Uneven routing in one layer, and one in which the second rank has no token; the same bits in every case."""

    def build(group: Any) -> torch.nn.Sequential:
        return models.build(group, weights_in="activation" if group else "combine")

    mesh, problems = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)), list[str]()
    exchange = Delayed(build_exchange(mesh.get_group("ep")), seed=rank)
    for dtype, limit, cases in ((torch.float64, 1e-12, CASES[:-1]), (torch.bfloat16, math.inf, CASES[:3:2])):
        with models.default_dtype(dtype):
            problems += orders_apart(build, cases, mesh, MICROBATCHES, limit, exchange=exchange)
    assert not problems, problems


def test_a_loss_that_blocks_leave_in_a_list_is_one_line() -> None:
    left: list[Tensor] = []

    class Leaves(models.Block):
        def forward(self, x: Tensor) -> Tensor:
            share = self.mix(x).sigmoid()
            left.append(share.square().mean())
            return super().forward(x) * share

    def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
        total = sum(left, models.loss_fn(logits, target))
        left.clear()
        return total

    inputs, target = models.batch(MICROBATCHES)
    engine = make(models.build(block=Leaves), build_schedule("sequential", microbatches=MICROBATCHES), loss_fn=loss_fn)
    with (
        pytest.warns(UserWarning, match="left in an attribute, a list"),
        pytest.raises(
            ValueError, match=r"^the backward of block \d .* graph that has been walked before.* one more output"
        ),
    ):
        engine.step(inputs, target=target)
