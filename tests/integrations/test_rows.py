"""DeepSpeed's AutoEP layers, unmodified: their exchanges are found and hidden, and gradients are equal."""

import os
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import cycle
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from overlap1f1b.integrations.rows import exchange_by_rows
from overlap1f1b.plan import Op, Overlap
from tests.play.plain import HIDDEN, MICROBATCHES, batch, compare, engine_of
from tests.ranks import over
from tests.tiers import wide

pytestmark = pytest.mark.skipif(
    find_spec("deepspeed") is None or find_spec("transformers") is None, reason="deepspeed is not installed"
)
LAYERS = 2


class Block(nn.Module):
    """A norm and a layer of experts."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.norm, self.experts = nn.LayerNorm(HIDDEN), experts

    def forward(self, x: Tensor) -> Tensor:
        found = self.experts(self.norm(x).unsqueeze(0))  # AutoEP takes a batch of sequences
        return x + (found[0] if isinstance(found, tuple) else found).squeeze(0)


def _build(mesh: DeviceMesh, **chosen: Any) -> nn.Sequential:
    """Return blocks with the MoE layers of a Mixtral model, which AutoEP's take the place of, with options of it."""
    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.module_inject.auto_ep_config import AutoEPConfig
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=HIDDEN, intermediate_size=24, num_hidden_layers=LAYERS, num_local_experts=8,
        num_experts_per_tok=2, num_attention_heads=2, num_key_value_heads=2, vocab_size=32,
    )  # fmt: skip
    model: Any = MixtralForCausalLM(config)
    options: Any = AutoEPConfig(enabled=True, autoep_size=mesh.size(), use_grouped_mm=False, **chosen)
    layers = []
    for spec in AutoEP(model, options).ep_parser():
        source = model.get_submodule(spec.moe_module_name)
        layers.append(AutoEPMoELayer(spec, source, mesh.size(), mesh.get_local_rank(), options))
        layers[-1].ep_group = mesh.get_group()
    return nn.Sequential(*map(Block, layers), nn.Linear(HIDDEN, HIDDEN))


def _mesh(size: int) -> DeviceMesh:
    import deepspeed

    backend: Any = import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None  # it would compile an operator of its own
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False, dist_init_required=False)
    return init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))


@pytest.mark.parametrize(("ranks", "overlaps"), [(2, (3,)), *wide((4, ("pairs", 3)))])
@over(lambda ranks, _: ranks)
def test_auto_ep(rank: int, size: int, ranks: int, overlaps: tuple[Overlap, ...]) -> None:
    mesh = _mesh(size)
    build, exchanges = partial(_build, mesh), 2 * 2 * LAYERS * MICROBATCHES
    problems = [p for k in overlaps for p in compare(f"overlap {k}", build, mesh, exchanges=exchanges, overlap=k)]
    problems += _summed(build, mesh)
    assert not problems, problems


def _summed(build: Callable[[], nn.Module], mesh: DeviceMesh) -> list[str]:
    """Return the gradients that are not summed over the ranks that hold the same parameters."""
    found: list[dict[str, Tensor]] = []
    for reduce in (False, True):
        torch.manual_seed(7)
        model, (x, y) = build(), batch(mesh.get_local_rank())
        engine_of(model, mesh, reduce=reduce).step(x, target=y)
        found.append({name: torch.zeros(p.shape) if p.grad is None else p.grad for name, p in model.named_parameters()})
    alone, summed = found
    marked = {name for name, p in model.named_parameters() if not getattr(p, "allreduce", True)}
    for name, grad in alone.items():
        if name not in marked:
            dist.all_reduce(grad)
    return [name for name, grad in alone.items() if not torch.allclose(grad, summed[name])] + ["no experts"] * (
        not marked
    )


PLAYED: dict[str, tuple[Overlap, dict[str, Any]]] = {
    "own": ("serial", {}), "serial": ("serial", {}), "3": (3, {}), "parts": (3, {"parts": 2}),
    "capacity": ("pairs", {"capacity": 4.0}),
}  # fmt: skip


@over(2)
def test_our_exchange_in_auto_ep(rank: int, size: int) -> None:
    """Router, experts and where scores act are DeepSpeed's; our rows, counts, parts and capacity."""
    mesh, problems = _mesh(size), list[str]()
    for applied, names in (("post", ("own", "serial", "3", "capacity")), ("pre", ("own", "parts"))):
        found: dict[str, dict[str, Tensor]] = {}
        for name in names:
            overlap, options = PLAYED[name]
            torch.manual_seed(7)
            model, (x, y) = _build(mesh, score_apply=applied), batch(mesh.get_local_rank())
            if name != "own" and exchange_by_rows(model) != LAYERS:
                problems.append("layers are missing")
            engine = engine_of(model, mesh, overlap=overlap, **options)
            for _ in range(2):
                model.zero_grad()
                engine.step(x, target=y)
            found[name] = {label: p.grad for label, p in model.named_parameters() if p.grad is not None}
            ops = {node.op for node in engine.plan.nodes}
            if name != "own" and Op.COUNTS not in ops:
                problems.append(f"{name}: no counts of ours in {ops}")
        for name, grads in found.items():
            same = torch.equal if name == "3" else partial(torch.allclose, rtol=1e-4, atol=1e-6)
            beside = found["serial" if name == "3" else "own"]
            problems += [f"{applied}, {name}: {label}" for label in beside if not same(grads[label], beside[label])]
            if grads.keys() != beside.keys():
                problems.append(f"{applied}, {name}: other parameters")
    assert not problems, problems


class CapacityBlock(Block):
    """A norm and DeepSpeed's older layer, which sends ``[E, C, H]`` with room for C rows of each expert."""

    def forward(self, x: Tensor) -> Tensor:
        out, auxiliary, _ = self.experts(self.norm(x).unsqueeze(0))
        return x + out.squeeze(0) + 0.01 * auxiliary


def _capacity_blocks(mesh: DeviceMesh, options: dict[str, Any], *, grouped: bool = True) -> nn.Sequential:
    from deepspeed.moe.layer import MoE

    blocks = []
    for _ in range(LAYERS):
        expert = nn.Sequential(nn.Linear(HIDDEN, 24), nn.GELU(), nn.Linear(24, HIDDEN))
        # Random choices would be others than in a plain loop.
        chooses: Any = {"use_rts": False, "top2_2nd_expert_sampling": False, "min_capacity": 2}
        layer = MoE(HIDDEN, expert, num_experts=8, ep_size=mesh.size(), **chooses, **options)
        if grouped:
            layer.deepspeed_moe._set_ep_group(mesh.get_group())
        blocks.append(CapacityBlock(layer))
    return nn.Sequential(*blocks, nn.Linear(HIDDEN, HIDDEN))


CAPACITIES = [{"k": 1}, {"k": 2, "use_residual": True, "drop_tokens": False}, {"k": 2}, {"k": 1, "drop_tokens": False}]
"""With ``drop_tokens=False`` the room follows the load, so it is another in each microbatch."""


@pytest.mark.parametrize("tried", [CAPACITIES[:2], *wide(CAPACITIES[2:])])
@over(2)
def test_capacities(rank: int, size: int, tried: list[dict[str, Any]]) -> None:
    mesh, problems = _mesh(size), list[str]()
    for options, overlap in zip(tried, cycle(("pairs", 3)), strict=False):
        build, exchanges = partial(_capacity_blocks, mesh, options), 2 * 2 * LAYERS * MICROBATCHES
        problems += compare(f"{options}, overlap {overlap}", build, mesh, exchanges=exchanges, overlap=overlap)
    assert not problems, problems


def _initialized(model: nn.Module, stage: int) -> Any:
    """Return DeepSpeed's engine of a model under a stage of ZeRO; it makes the groups of experts."""
    import deepspeed

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    config = {"train_micro_batch_size_per_gpu": 4, "zero_allow_untested_optimizer": True}
    with patch.dict(os.environ, {"LOCAL_RANK": str(dist.get_rank())}):
        return deepspeed.initialize(
            model=model, optimizer=optimizer, config=config | {"zero_optimization": {"stage": stage}}
        )[0]


@over(2)
def test_deepspeeds_own_engine(rank: int, size: int) -> None:
    """Of stage 0 it makes the groups of ``MoE`` and steps; gradients of higher stages are its own backward's alone."""
    mesh, problems = _mesh(size), list[str]()

    def build() -> nn.Sequential:
        model = _capacity_blocks(mesh, CAPACITIES[0], grouped=False)
        return nn.Sequential(*_initialized(model, 0).module)

    problems += compare("stage 0", build, mesh, exchanges=2 * 2 * LAYERS * MICROBATCHES, overlap=3)
    assert not problems, problems
    x, y = batch(rank)
    for stage in (1, 2, 3):
        dense = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN))
        later = engine_of(dense, mesh)  # before DeepSpeed has the model
        wrapped = _initialized(dense, stage)
        named = rf" under DeepSpeed's ZeRO {'stage 3' if stage == 3 else 'stage 1 or 2'}; allowed: stage 0, or fully_"
        for given in (wrapped.module, list(wrapped.module)):
            with pytest.raises(ValueError, match=named):
                engine_of(given, mesh)
        with pytest.raises(ValueError, match=named):
            later.step(x, target=y)
