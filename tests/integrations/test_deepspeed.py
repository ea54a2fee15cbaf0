"""DeepSpeed's AutoEP layers, unmodified: their exchanges are found and hidden, and gradients are equal."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from overlap1f1b.engine import Engine
from overlap1f1b.plan import NodeCosts, Op
from overlap1f1b.schedule import build_schedule
from tests import models
from tests.ranks import Ranks

pytestmark = pytest.mark.skipif(
    find_spec("deepspeed") is None or find_spec("transformers") is None, reason="deepspeed is not installed"
)
HIDDEN, MICROBATCHES, LAYERS, TOKENS = 16, 4, 2, 9
COSTS = NodeCosts.uniform(attention=3, experts=4, dispatch=5, aggregate=0.2, dense=1, reduce=2)


class Block(nn.Module):
    """A norm and a layer of experts."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.norm, self.experts = nn.LayerNorm(HIDDEN), experts

    def forward(self, x: Tensor) -> Tensor:
        found = self.experts(self.norm(x))
        return x + (found[0] if isinstance(found, tuple) else found)


def _build(mesh: DeviceMesh) -> nn.Sequential:
    """Return blocks with the MoE layers of a Mixtral model, which AutoEP's take the place of."""
    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.module_inject.auto_ep_config import AutoEPConfig
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(3)
    config = MixtralConfig(
        hidden_size=HIDDEN, intermediate_size=24, num_hidden_layers=LAYERS, num_local_experts=8,
        num_experts_per_tok=2, num_attention_heads=2, num_key_value_heads=2, vocab_size=32,
    )  # fmt: skip
    model: Any = MixtralForCausalLM(config)
    options: Any = AutoEPConfig(enabled=True, autoep_size=mesh.size(), use_grouped_mm=False)
    layers = []
    for spec in AutoEP(model, options).ep_parser():
        source = model.get_submodule(spec.moe_module_name)
        layers.append(AutoEPMoELayer(spec, source, mesh.size(), mesh.get_local_rank(), options))
        layers[-1].ep_group = mesh.get_group()
    return nn.Sequential(*map(Block, layers), nn.Linear(HIDDEN, HIDDEN))


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def _compare(rank: int, size: int) -> list[str]:
    import deepspeed

    backend: Any = import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None  # it would compile an operator of its own
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False, dist_init_required=False)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    data = torch.randn(2, MICROBATCHES, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(rank))
    plain, problems = _build(mesh), []
    for x, y in zip(data[0].chunk(MICROBATCHES), data[1].chunk(MICROBATCHES), strict=True):
        (_loss(plain(x), y) / (MICROBATCHES * size)).backward()
    for overlap in ("pairs", 3):
        model = _build(mesh)
        program = build_schedule("combined_1f1b", microbatches=MICROBATCHES, extra_warmup=1)
        engine = Engine(
            model, program, mesh=mesh, loss_fn=_loss, overlap=overlap, costs=COSTS, reduce=False, timeout=30
        )
        for step in range(3):
            model.zero_grad()
            engine.step(data[0], target=data[1])
            found = models.equal(models.gradients(model), models.gradients(plain))
            problems += [f"{overlap}, step {step}: {name}" for name in found]
        exchanged = [node for node in engine.plan.ranks[0] if node.op in (Op.DISPATCH, Op.COMBINE)]
        if len(exchanged) != 2 * 2 * LAYERS * MICROBATCHES:
            problems.append(f"{overlap}: {len(exchanged)} exchanges in the plan")
    return problems


def test_auto_ep(ranks2: Ranks) -> None:
    assert ranks2.run(_compare, timeout=60) == [[], []]


@pytest.mark.slow
def test_auto_ep_on_four_ranks(ranks4: Ranks) -> None:
    assert ranks4.run(_compare, timeout=60) == [[], [], [], []]
