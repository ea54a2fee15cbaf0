"""Routing weights inside the experts, through the engine: gradients, exchanges, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b.plan import Overlap
from overlap1f1b.schedule import build_schedule
from overlap1f1b.transport.exchange import build_exchange
from overlap1f1b.transport.loopback import LoopbackExchange
from tests import models
from tests.engine.test_engine import Delayed
from tests.engines import COSTS, make
from tests.play.plain import default_dtype
from tests.ranks import over

MICROBATCHES = 3
Case = tuple[str, Overlap, dict[str, Any]]
CASES: list[Case] = [
    ("sequential", "serial", {}),
    ("combined_1f1b", "pairs", {}),
    ("zb_h1", 3, {}),
    ("combined_1f1b", 3, {"recompute": "experts"}),
    ("combined_1f1b", 3, {"recompute": "block"}),
    ("combined_1f1b", 3, {"capacity": 2.0}),  # room for every row
]


def gradients(model: torch.nn.Sequential, data: tuple[Tensor, Tensor], case: Case, **options: Any) -> dict[str, Tensor]:
    name, overlap, more = case
    program = build_schedule(name, microbatches=MICROBATCHES)  # type: ignore[arg-type]
    torch.manual_seed(1)
    options = (
        {"loss_fn": models.loss_fn, "overlap": overlap, "costs": COSTS, "timeout": 20, "verify": False} | more | options
    )
    make(model, program, **options).step(data[0], target=data[1])
    return models.gradients(model)


def far(found: dict[str, Tensor], wanted: dict[str, Tensor], limit: float) -> list[str]:
    """Names whose gradients differ by more than a share of their norm."""
    return [n for n, w in wanted.items() if float((found[n] - w).norm()) > limit * float(w.norm())]


@pytest.mark.parametrize("expert_calls", [1, pytest.param(2, marks=pytest.mark.wide)])
def test_one_rank(expert_calls: int) -> None:
    data = models.batch(MICROBATCHES)
    _, outside = models.plain_gradients(models.build(expert_calls=expert_calls), *data, MICROBATCHES)
    within: dict[str, Any] = {"expert_calls": expert_calls, "weights_in": "activation"}
    _, inside = models.plain_gradients(models.build(**within), *data, MICROBATCHES)
    assert not far(inside, outside, 1e-5)
    reference: dict[str, Tensor] = {}
    for case in CASES:
        exchange = LoopbackExchange(torch.device("cpu")) if case[1] == 3 else None
        found = gradients(models.build(**within), data, case, exchange=exchange)
        reference = reference or found
        assert not models.equal(found, reference), case
    assert not (models.equal(reference, inside) if expert_calls == 1 else far(reference, inside, 1e-5))


@over(2, timeout=120)
def test_two_ranks(rank: int, size: int) -> None:
    """Uneven routing in one layer, and one in which the second rank has no token; the same bits in every case."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    group, problems = mesh.get_group("ep"), []
    data = [models.batch(MICROBATCHES, seed=r) for r in range(size)]
    for dtype, limit, cases in (
        (torch.float64, 1e-12, CASES[:-1]),
        (torch.bfloat16, None, (CASES[0], CASES[2])),
    ):
        with default_dtype(dtype):
            whole = models.build()
            for batch in data:
                _, expected = models.plain_gradients(whole, *batch, MICROBATCHES, 1 / size)
            reference: dict[str, Tensor] = {}
            for case in cases:
                model = models.build(group, weights_in="activation")
                exchange = Delayed(build_exchange(group), seed=rank)
                found = gradients(model, data[rank], case, mesh=mesh, exchange=exchange)
                reference = reference or found
                problems += [f"{dtype} {case}: {name}" for name in models.equal(found, reference)]
        local = models.E // size
        mine = {n: g[rank * local : (rank + 1) * local] if "experts" in n else g for n, g in expected.items()}
        if limit is not None:
            problems += [f"{dtype}: {name} is not that of one process" for name in far(reference, mine, limit)]
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
