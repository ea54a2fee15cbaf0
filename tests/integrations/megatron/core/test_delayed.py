"""Weight gradients that layers delay until ``backward_dw`` are computed by the plan's weight nodes."""

from __future__ import annotations

import traceback
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from torch import nn

from overlap1f1b.cut.blocks import MicrobatchBlock
from overlap1f1b.cut.stage import Stage
from overlap1f1b.integrations.megatron.layers import delayed_of
from tests.integrations.megatron.core import models, shim, transformer_engine
from tests.integrations.megatron.core.cases import CASES
from tests.integrations.megatron.core.steps import our_step
from tests.ranks import over


@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
@over(2)
def test_delayed_gradients_are_computed_by_weight_nodes(rank: int, size: int) -> None:
    shim.apply()
    stores: dict[transformer_engine.Store, int] = {}
    inside, apart, left = 0, 0, 0  # gradients computed inside a backward and apart from it, and most that a store had
    backward, pop = transformer_engine.Products.backward, transformer_engine.Store.pop

    def counted_backward(ctx: Any, *grads: Any) -> Any:
        nonlocal left
        store = ctx.layer.wgrad_store
        stores[store] = stores.get(store, 0) + 1
        returned = backward(ctx, *grads)
        left = max(left, store.context.qsize())
        return returned

    def counted_pop(store: transformer_engine.Store) -> Any:
        nonlocal inside, apart
        names = {frame.f_code.co_name for frame, _ in traceback.walk_stack(None)}
        walks = bool(names & {"counted_backward", "walk"})
        inside, apart = inside + walks, apart + (not walks)
        stores[store] -= 1
        return pop(store)

    case = CASES["delayed, grouped"]
    with (
        patch.object(transformer_engine.Products, "backward", staticmethod(counted_backward)),
        patch.object(transformer_engine.Store, "pop", counted_pop),
        models.init_parallel(ep=case.ep),
    ):
        our_step(case, 3, verify=False)
    assert not any(stores.values())
    assert not any("put" in store.__dict__ for store in stores)
    assert not inside
    assert apart > 0
    assert not left  # in the plan's queues, not in the store


def _model(*, bias: bool = False, skip_bias_add: bool = False, delay: bool = True) -> nn.Module:
    config = SimpleNamespace(
        gradient_accumulation_fusion=False, delay_wgrad_compute=delay, expert_model_parallel_size=1
    )
    layer = transformer_engine.Linear(4, 3, config=config, bias=bias, is_expert=False, skip_bias_add=skip_bias_add)
    return nn.Sequential(layer)


def test_layers_that_delay_are_found() -> None:
    assert delayed_of(_model(delay=False)) == []
    assert delayed_of(nn.Linear(4, 3)) == []
    assert delayed_of(_model().requires_grad_(False)) == []
    model = _model(bias=True)
    assert delayed_of(model) == [model[0]]  # type: ignore[index]


def test_blocks_that_delay_have_weight_nodes() -> None:
    block = MicrobatchBlock()
    assert not Stage([block]).shape[0].split
    block.delays = True
    assert Stage([block]).shape[0].split


def test_gradients_that_could_get_lost_are_refused() -> None:
    with pytest.raises(ValueError, match=r"in 0 \(Linear\), which returns its bias; allowed: no such bias"):
        delayed_of(_model(bias=True, skip_bias_add=True))
    old = _model()
    for parameter in old.parameters():
        del parameter.skip_backward_post_hook  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="which marks no parameter by skip_backward_post_hook; allowed: "):
        delayed_of(old)
    wrapper: Any = nn.Module()
    wrapper.module, wrapper.ddp_config = _model(), SimpleNamespace(delay_wgrad_compute=False)
    with pytest.raises(ValueError, match="delay_wgrad_compute=False in ddp_config, and True in the model's layers"):
        delayed_of(wrapper)
