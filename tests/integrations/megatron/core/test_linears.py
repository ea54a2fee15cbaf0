"""Weight gradients of linear layers, Megatron-Core's and those that wait for backward_dw, are computed apart."""

import sys
import traceback
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from overlap1f1b.cut.blocks import MicrobatchBlock
from overlap1f1b.cut.replacement import replaced
from overlap1f1b.cut.stage import Stage
from overlap1f1b.integrations.megatron import get_forward_backward_func, layers
from overlap1f1b.integrations.megatron.forward_backward import COMBINED_NO_PIPELINING
from overlap1f1b.integrations.megatron.layers import delayed_of
from overlap1f1b.moe import GroupedExperts
from overlap1f1b.play.gradients import WeightQueue
from tests import products
from tests.integrations.megatron.core import models, shim, transformer_engine
from tests.integrations.megatron.core.cases import CASES, FULL, OVERLAP_REDUCE, Case, selective
from tests.integrations.megatron.core.steps import one_step, our_step
from tests.ranks import over

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")


@over(2)
def test_weight_gradients_are_apart(rank: int, size: int) -> None:
    shim.apply()
    case, found, plain = Case(fused=True, ddp=OVERLAP_REDUCE), [0, 0], shim.add_weight_gradient

    def add(rows: Tensor, grad: Tensor, main: Tensor) -> None:
        names = {frame.f_code.co_name for frame, _ in traceback.walk_stack(None)}
        found[not names & {"backward", "walk"}] += 1
        plain(rows, grad, main)

    with patch.object(shim, "add_weight_gradient", add), models.init_parallel(ep=case.ep):
        our_step(case, 3, verify=False)
    inside, apart = found  # of the backward of a layer
    assert not inside
    assert apart > 0


class Mixed(nn.Module):
    """An MLP made of this project's experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(4, models.HIDDEN))
        self.experts = GroupedExperts(4, models.HIDDEN, 24)

    def forward(self, x: Tensor, *more: object, **named: object) -> tuple[Tensor, None]:
        tokens = x.reshape(-1, models.HIDDEN)
        weights, indices = (tokens @ self.gate.t()).softmax(-1).topk(2, -1)
        return self.experts(tokens, indices, weights).view_as(x), None


def _mixed_model(*, fused: bool, layers: int = 2, **fields: Any) -> nn.Module:
    """Return a dense model with this project's experts in place of each MLP."""
    dense: dict[str, Any] = {"num_moe_experts": None, "moe_ffn_hidden_size": None}
    config = models.config_of(layers=layers, gradient_accumulation_fusion=fused, **dense, **fields)
    chunk: Any = models.build(config)[0]
    for layer in chunk.decoder.layers:
        layer.mlp = Mixed()
    models.fill(chunk)
    for parameter in chunk.parameters() if fused else ():
        parameter.main_grad, parameter.grad_added_to_main_grad = torch.zeros_like(parameter), False
    return chunk


MIXED: list[tuple[bool, dict[str, Any]]] = [
    (False, {}), (True, {"layers": 1}), (True, selective("core_attn")), (False, FULL),
]  # fmt: skip
"""Whether weight gradients are fused, and fields of the config."""


@over(2)
def test_our_experts_in_megatrons_layers(rank: int, size: int) -> None:
    """Against a plain loop over the microbatches: to the bit, or as a product rounds that adds to what is there."""
    shim.apply()
    with models.init_parallel():
        shim.fuse_weight_gradients()
        for fused, fields in MIXED:
            expected, model = (_mixed_model(fused=fused, **fields) for _ in range(2))
            for batch in models.batches(3, 1):
                (expected(**{key: value for key, value in batch.items() if key != "seed"}).mean() / 3).backward()
            one_step(get_forward_backward_func(schedule=COMBINED_NO_PIPELINING), model, 3)
            wanted, found = models.grads([expected]), models.grads([model])
            if fused:
                torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)
            assert fused or not (lines := models.compared(wanted, found)), (fields, lines)


@over(2)
def test_weights_of_another_class_keep_their_products(rank: int, size: int) -> None:
    """In this project's experts and in Megatron-Core's linear layers, to the bit of a plain loop."""
    shim.apply()
    with models.init_parallel():
        expected, model, plain = (_mixed_model(fused=False) for _ in range(3))
        for chunk in (expected, model):
            products.convert(chunk, products.Wrapped)
        for chunk in (expected, plain):
            for batch in models.batches(3, 1):
                (chunk(**{key: value for key, value in batch.items() if key != "seed"}).mean() / 3).backward()
        one_step(get_forward_backward_func(schedule=COMBINED_NO_PIPELINING), model, 3)
        wanted, found, other = (models.grads([chunk]) for chunk in (expected, model, plain))
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
        assert any("experts" in name and not torch.equal(other[name], value) for name, value in wanted.items())


def test_the_kernel_gets_rows_without_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = SimpleNamespace()
    monkeypatch.setitem(sys.modules, layers.LINEARS, module)
    module.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=shim.add_weight_gradient)
    weight: Any = nn.Parameter(torch.randn(2, 3))
    weight.main_grad = torch.zeros(2, 3)
    layer = SimpleNamespace(weight=weight, _forward_impl=None)
    queue = WeightQueue()
    stage: Any = SimpleNamespace(put=queue.put, anchor=torch.empty(0, requires_grad=True))
    rows, grad = torch.randn(5, 4, 7)[..., :3], torch.randn(2).expand(5, 4, 2)  # of a slice, and of a sum
    with replaced([layers.deferring(layer, lambda: stage)]):
        forward: Any = layer._forward_impl
        forward(rows, weight, gradient_accumulation_fusion=True).backward(grad)
    queue.compute()
    torch.testing.assert_close(weight.main_grad, grad.flatten(0, 1).t() @ rows.flatten(0, 1))


# ------------------------------------------------------------------------- gradients that wait for backward_dw


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
