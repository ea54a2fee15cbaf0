"""Steps of real models of Megatron-Core against its own schedules: losses and gradients are equal bit by bit."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from overlap1f1b.engine import EngineOptions
from overlap1f1b.integrations.megatron import get_forward_backward_func
from overlap1f1b.integrations.megatron.forward_backward import COMBINED_NO_PIPELINING
from overlap1f1b.plan import Overlap, Resource
from overlap1f1b.play.recompute import DroppedPart
from overlap1f1b.transport.exchange import PeerExchange
from tests.engines import COSTS
from tests.integrations.megatron.chunks import engine_of
from tests.integrations.megatron.core import flex, models, shim
from tests.integrations.megatron.core.cases import BLOCKS, CASES, FULL, PROGRAMS, Case, Fields, selective
from tests.integrations.megatron.core.steps import of_pipeline, one_step, our_step, serial_step, unlike
from tests.ranks import over
from tests.tiers import first, wide

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")


@pytest.mark.parametrize(
    ("case", "overlap"),
    [
        *first(((name, "pairs" if at % 3 == 2 else 3) for at, name in enumerate(CASES)), ("plain", 3)),
        *first(((name, 3) for name in PROGRAMS), ("zb_h1, ep 1", 3)),
    ],
)
@over(lambda name, _: (CASES | PROGRAMS)[name].ranks)
def test_steps(rank: int, size: int, case: str, overlap: Overlap) -> None:
    """By Megatron-Core's own schedule and by ours, two of three by the default overlap; a program's by place."""
    of = (CASES | PROGRAMS)[case]
    shim.apply()
    flex.apply(delay_ms=2.0)  # anew: a buffer belongs to groups
    with models.init_parallel(tp=of.tp, etp=of.etp, pp=of.pp, ep=of.ep, vp=of.vp):
        pair = serial_step(of), our_step(of, overlap)
        problems = unlike(*(map(of_pipeline, pair) if of.program else pair))[:3]
    assert not problems, problems


class Unseeded(Case):
    """A case whose forward steps do not seed dropout, so that it draws from the engine's streams."""

    dropout = False


RECOMPUTED: dict[str, Case] = {
    "first layer": Unseeded(BLOCKS),
    "MoE layers": Unseeded(selective("moe")),
    "core attention": Unseeded(selective("core_attn")),
    "layers, vp 2": Unseeded(FULL, layers=4, pp=2, vp=2, microbatches=4),
}


@contextmanager
def _dropout(known: dict[Any, Tensor], *, repeats: bool) -> Iterator[None]:
    """Add the mask that a call of dropout draws to ``known``, by its input; or repeat the first one of this input."""
    real = F.dropout

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or not p:
            return x
        key = (p, x.shape, x.detach().numpy().tobytes())
        if repeats:
            return x * known[key]
        mask = torch.dropout(torch.ones_like(x, requires_grad=False), p, train=True)
        known.setdefault(key, mask)
        return x * mask

    F.dropout = dropout
    try:
        yield
    finally:
        F.dropout = real


@pytest.mark.parametrize("name", first(RECOMPUTED, "first layer"))
@over(lambda name: RECOMPUTED[name].ranks)
def test_a_recomputation_repeats_the_masks_of_its_forward(rank: int, size: int, name: str) -> None:
    """Under the masks of ours Megatron-Core's own steps give the same."""
    shim.apply()
    case = RECOMPUTED[name]
    fields: Fields = {"hidden_dropout": 0.2, "attention_dropout": 0.3}
    case, known = replace(case, fields=case.fields | fields), dict[Any, Tensor]()
    with models.init_parallel(pp=case.pp, ep=case.ep, vp=case.vp):
        with _dropout(known, repeats=False):
            ours = our_step(case, 3)
        with _dropout(known, repeats=True):
            problems = unlike(serial_step(case), ours)
    assert not problems, problems


# ----------------------------------------------------------------------------------------------- libraries, recompute

LANE = "overlap1f1b-combine-start"


@pytest.mark.parametrize("name", ["DeepEP", *wide("HybridEP")])
@over(2)
def test_a_library_is_called_by_a_lane(rank: int, size: int, name: str) -> None:
    """In a thread behind compute, in the two steps after one that hides nothing."""
    shim.apply()
    flex.apply()
    case = CASES[name]
    with models.init_parallel(ep=case.ep):
        flex.threads.clear()
        our_step(case, 3, verify=False)
    once = 4 * case.layers * case.microbatches  # a dispatch and a combine, there and back
    assert len(flex.threads) == case.steps * once
    assert set(flex.threads[:once]) == {"MainThread"}, flex.threads
    assert set(flex.threads[once:]) == {LANE}, flex.threads


LAYERS, MICROBATCHES = 2, 3


@pytest.mark.parametrize(("fields", "again"), [(FULL, LAYERS), *wide((BLOCKS, 1), (selective("moe"), LAYERS))])
@over(2)
def test_nothing_is_exchanged_twice(rank: int, size: int, fields: Fields, again: int) -> None:
    """Of layers that Megatron-Core computes again, whose exchanges are hidden."""
    shim.apply()
    with models.init_parallel(ep=size):
        (chunk,) = models.build(models.config_of(layers=LAYERS, ep=size, **fields))
        options = EngineOptions(costs=COSTS, verify=False, timeout=30)
        function = get_forward_backward_func(schedule=COMBINED_NO_PIPELINING, options=options)
        one_step(function, chunk, MICROBATCHES)  # shows where the chunk exchanges
        with (
            patch.object(PeerExchange, "rows", autospec=True, side_effect=PeerExchange.rows) as made,
            patch.object(DroppedPart, "compute", autospec=True, side_effect=DroppedPart.compute) as computed,
        ):
            planned = sum(node.resource is Resource.EXCHANGE for node in engine_of(function, chunk).plan.nodes)
            one_step(function, chunk, MICROBATCHES)
    assert planned == made.call_count == 4 * LAYERS * MICROBATCHES  # there and back, forward and backward
    assert computed.call_count == again * MICROBATCHES
