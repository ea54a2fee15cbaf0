"""Megatron-Core's MoE layers with our exchange: their own losses and gradients, rounded otherwise."""

from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from overlap1f1b.transport.exchange import PeerExchange
from tests.integrations.megatron.core import models, shim
from tests.integrations.megatron.core.cases import AUX, BIAS, BLOCKS, CASES, DDP, EIGHT, MTP, SHARED, Case, selective
from tests.integrations.megatron.core.steps import of_pipeline, our_step, serial_step, unlike
from tests.ranks import over
from tests.tiers import first

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")

ROWS: dict[str, Case] = {
    "eight experts, shared experts, aux loss": Case({**EIGHT, **SHARED, **AUX}),
    "expert bias, MTP, DDP": Case({**EIGHT, **BIAS, **MTP}, ddp=DDP),
    "allgather, sinkhorn, one expert a token": Case(
        {"moe_token_dispatcher_type": "allgather", "moe_router_topk": 1, "moe_router_load_balancing_type": "sinkhorn"}
    ),
    "MoE layers recomputed": Case({**EIGHT, **selective("moe")}, measures=True),
    "layers recomputed, delayed": Case({**EIGHT, **BLOCKS}, linears="te grouped", microbatches=4),
    "ep 4, fused": Case(EIGHT, ep=4, fused=True),
    "pp 2, vp 2, tied": Case(EIGHT, layers=4, pp=2, vp=2, microbatches=4, tied=True),
    **{
        f"{name}, vp {vp}": Case(
            {**EIGHT, **SHARED}, layers=4, pp=2, vp=vp, microbatches=4, program=name, in_v=name in ("zb_v", "dualpipev")
        )
        for name, vp in (
            ("afab", 2), ("zb_h1", None), ("zb_h1", 2), ("zb_h2", None), ("auto", 2), ("zb_v", 2), ("dualpipev", 2),
        )
    },
}  # fmt: skip


def _apart(expected: list[Any], found: list[Any]) -> list[str]:
    """Return a line on each gradient that differs by more than 1e-5 of the largest, and on losses."""
    lines = []
    for one, other in zip(expected, found, strict=True):
        if not torch.allclose(torch.tensor(one.losses), torch.tensor(other.losses), rtol=1e-5, atol=1e-7):
            lines.append(f"losses {one.losses}, {other.losses}")
        assert one.grads.keys() == other.grads.keys()
        size = max(float(grad.abs().max()) for grad in one.grads.values() if grad is not None)
        for name, grad in one.grads.items():
            mine: Tensor | None = other.grads[name]
            if (grad is None) != (mine is None) or (grad is not None and (grad - mine).abs().max() > 1e-5 * size):
                lines.append(f"{name} differs")
    return lines


IN_ROOM = ("eight experts, shared experts, aux loss", "MoE layers recomputed")
"""Cases that are also played with a capacity."""


@pytest.mark.parametrize("name", first(ROWS, "eight experts, shared experts, aux loss"))
@over(lambda name: ROWS[name].ranks)
def test_steps(rank: int, size: int, name: str) -> None:
    """Bit-equal between orders; against Megatron-Core's own dispatcher and schedule 1e-5 of the largest gradient."""
    shim.apply()
    case, sent = ROWS[name], list[int]()
    send = PeerExchange.rows

    def counting(self: Any, source: Tensor, *args: Any) -> Any:
        sent.append(len(source))
        return send(self, source, *args)

    with models.init_parallel(pp=case.pp, ep=case.ep, vp=case.vp), patch.object(PeerExchange, "rows", counting):
        ours = our_step(case, 3, rows=True)
        lines = [f"pairs: {line}" for line in unlike(our_step(case, "pairs", verify=False, rows=True), ours)]
        for parts in (2,) if name in IN_ROOM else (2, 3):
            lines += [f"{parts} parts: {line}" for line in _apart(ours, our_step(case, 3, rows=True, parts=parts))]
        if name in IN_ROOM:
            lines += [f"capacity: {line}" for line in _apart(ours, our_step(case, 3, rows=True, capacity=4.0))]
        lines += _apart(of_pipeline(serial_step(case)), of_pipeline(ours))
    assert not lines, lines[:3]
    assert 0 < max(sent) <= models.SEQUENCE * models.BATCH * case.ep  # a row for each token and rank


@over(2)
def test_what_a_dispatcher_would_do_otherwise_is_refused(rank: int, size: int) -> None:
    shim.apply()
    case = CASES["capacity, padded, MoE layers recomputed"]
    said = r"^moe_expert_capacity_factor=1\.0 with dispatcher='rows'; allowed: None$"
    with models.init_parallel(ep=case.ep), pytest.raises(ValueError, match=said):
        our_step(case, 3, rows=True)
