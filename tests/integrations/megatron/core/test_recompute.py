"""Layers that Megatron-Core computes again: their exchanges are hidden, and nothing is exchanged twice."""

from __future__ import annotations

from importlib.util import find_spec
from unittest.mock import patch

import pytest

from overlap1f1b.engine import EngineOptions
from overlap1f1b.integrations.megatron import get_forward_backward_func
from overlap1f1b.integrations.megatron.forward_backward import COMBINED_NO_PIPELINING
from overlap1f1b.plan import Resource
from overlap1f1b.play.recompute import DroppedPart
from overlap1f1b.transport.exchange import PeerExchange
from tests.engines import COSTS
from tests.integrations.megatron.chunks import engine_of
from tests.integrations.megatron.core import models, shim
from tests.integrations.megatron.core.cases import BLOCKS, FULL, Fields, selective
from tests.integrations.megatron.core.steps import one_step
from tests.ranks import over
from tests.tiers import wide

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")

LAYERS, MICROBATCHES = 2, 3


@pytest.mark.parametrize(("fields", "again"), [(FULL, LAYERS), *wide((BLOCKS, 1), (selective("moe"), LAYERS))])
@over(2)
def test_nothing_is_exchanged_twice(rank: int, size: int, fields: Fields, again: int) -> None:
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
