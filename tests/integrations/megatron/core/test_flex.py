"""The flex dispatchers' libraries are called behind compute: in a lane's thread, from the second step on."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.integrations.megatron.core import flex, models, shim
from tests.integrations.megatron.core.cases import CASES
from tests.integrations.megatron.core.steps import our_step
from tests.ranks import over
from tests.tiers import wide

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
LANE = "overlap1f1b-combine-start"


@pytest.mark.parametrize("name", ["DeepEP", *wide("HybridEP")])
@over(2)
def test_a_library_is_called_by_a_lane(rank: int, size: int, name: str) -> None:
    """In the two steps after one that hides nothing."""
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
