"""Routing weights inside the experts, through the engine: gradients, exchanges, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b.engine.play.memory import peak_bytes
from overlap1f1b.moe import MoEConfig, MoETransformer
from overlap1f1b.plan import Overlap, Recompute
from overlap1f1b.schedule import build_schedule
from overlap1f1b.transport.exchange import build_exchange
from overlap1f1b.transport.loopback import LoopbackExchange
from tests import models
from tests.engine.test_engine import Delayed
from tests.engines import COSTS, make
from tests.ranks import over

MICROBATCHES = 3
Case = tuple[str, Overlap, dict[str, Any]]
CASES: list[Case] = [
    ("sequential", "serial", {}),
    ("combined_1f1b", "pairs", {}),
    ("combined_1f1b", 2, {}),
    ("combined_1f1b", 3, {}),
    ("zb_h1", 3, {}),
    ("combined_1f1b", 3, {"recompute": "experts"}),
    ("combined_1f1b", 3, {"recompute": "attention"}),
    ("combined_1f1b", 3, {"recompute": "block"}),
    ("combined_1f1b", 3, {"capacity": 2.0}),  # room for every row
    ("combined_1f1b", 3, {"capacity": 0.75, "overflow": "rerun"}),
]


def gradients(model: torch.nn.Sequential, data: tuple[Tensor, Tensor], case: Case, **options: Any) -> dict[str, Tensor]:
    name, overlap, more = case
    program = build_schedule(name, microbatches=MICROBATCHES)  # type: ignore[arg-type]
    torch.manual_seed(1)
    options = {"loss_fn": models.loss_fn, "overlap": overlap, "costs": COSTS, "timeout": 20} | more | options
    make(model, program, **options).step(data[0], target=data[1])
    return models.gradients(model)


def far(found: dict[str, Tensor], wanted: dict[str, Tensor], limit: float) -> list[str]:
    """Names whose gradients differ by more than a share of their norm."""
    return [n for n, w in wanted.items() if float((found[n] - w).norm()) > limit * float(w.norm())]


@pytest.mark.parametrize("expert_calls", [1, 2])
def test_one_rank(expert_calls: int) -> None:
    data = models.batch(MICROBATCHES)
    _, outside = models.plain_gradients(models.build(expert_calls=expert_calls), *data, MICROBATCHES)
    _, inside = models.plain_gradients(
        models.build(expert_calls=expert_calls, weights_in="activation"), *data, MICROBATCHES
    )
    assert not far(inside, outside, 1e-5)
    reference: dict[str, Tensor] = {}
    for case in CASES:
        exchange = LoopbackExchange(torch.device("cpu")) if case[1] == 3 else None
        found = gradients(
            models.build(expert_calls=expert_calls, weights_in="activation"), data, case, exchange=exchange
        )
        reference = reference or found
        assert not models.equal(found, reference), case
    assert not (models.equal(reference, inside) if expert_calls == 1 else far(reference, inside, 1e-5))


def _compared(rank: int, size: int) -> list[str]:
    """Uneven routing in one layer, and one in which the second rank has no token; the same bits in every case."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    group, problems = mesh.get_group("ep"), []
    data = [models.batch(MICROBATCHES, seed=r) for r in range(size)]
    for dtype, limit, cases in (
        (torch.float64, 1e-12, [*CASES[:4], *CASES[7:9]]),
        (torch.float32, 1e-5, CASES[:1]),
        (torch.bfloat16, None, (CASES[0], CASES[3])),
    ):
        torch.set_default_dtype(dtype)
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
    return problems


@over(2, timeout=120)
def test_two_ranks(rank: int, size: int) -> list[str]:
    try:
        return _compared(rank, size)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("recompute", ["experts", "block"])
def test_what_came_back_is_not_kept(recompute: Recompute) -> None:
    """What one microbatch more holds until its backward: K rows a token less, in each layer.

    What is inside the experts, where SwiGLU with weights saves less too, is computed again.
    """
    tokens, hidden, layers, top_k = 128, 64, 2, 2

    def peak(microbatches: int, **options: Any) -> int:
        model = MoETransformer(
            MoEConfig(layers=layers, hidden=hidden, intermediate=128, sequence=tokens, top_k=top_k, **options)
        )
        program = build_schedule("afab", microbatches=microbatches)
        engine = make(model, program, overlap="serial", costs=COSTS, recompute=recompute)
        data = torch.randint(256, (2, microbatches, tokens), generator=torch.Generator().manual_seed(1))
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        return peak_bytes(torch.device("cpu"), lambda: engine.step(data[0], target=data[1]))

    outside, inside = (peak(5, weights_in=where) - peak(4, weights_in=where) for where in ("combine", "activation"))
    less = top_k * hidden * 4 - top_k * 16
    if recompute == "block":  # their sum is kept instead
        less -= hidden * 4
    assert outside - inside >= layers * tokens * less


def test_a_sum_that_is_kept_may_not_be_changed() -> None:
    """It would be changed again when it is computed again."""

    class Frozen(models.Block):
        def forward(self, x: Tensor) -> Tensor:
            tokens = self.mix(x).flatten(0, -2)
            choice = self.choose(tokens, self.gates[0](tokens))
            with torch.no_grad():
                y = self.experts[0](tokens, *choice)
            y += tokens
            return y.view(x.shape)

    data = models.batch(MICROBATCHES)
    for where, recompute in (("combine", "block"), ("activation", "experts")):
        expected, found = (
            gradients(models.build(block=Frozen, weights_in=where), data, ("sequential", "serial", more))
            for more in ({}, {"recompute": recompute})
        )
        assert not models.equal(found, expected)
    error = (
        r"^block 1 \(Frozen\) changes the result of its experts in place, with recompute='block' and "
        r"weights_in='activation'; allowed: a copy"
    )
    with pytest.raises(ValueError, match=error):
        gradients(
            models.build(block=Frozen, weights_in="activation"), data, ("sequential", "serial", {"recompute": "block"})
        )
