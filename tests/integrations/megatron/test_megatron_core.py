"""The drop-in with Megatron-Core itself: its models, its own schedules as the reference."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overlap1f1b.integrations.megatron import get_forward_backward_func
from overlap1f1b.moe import GroupedExperts
from tests import models
from tests.integrations.megatron import on_cpu as client
from tests.integrations.megatron.core import shim
from tests.ranks import run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed"),
]
M = 3
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
CASES: dict[str, dict[str, Any]] = {
    "auxiliary loss": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.5},
    "z loss, scaled": {"moe_z_loss_coeff": 0.1, "grad_scale_func": lambda loss: loss * 3},
    "layers of MTP": {"mtp_num_layers": 1, "moe_z_loss_coeff": 0.1},
    "by tokens": {"mtp_num_layers": 1, "moe_z_loss_coeff": 0.1, "calculate_per_token_loss": True},
    "attention is recomputed": SELECTIVE,
    "experts are recomputed": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "layers are recomputed": FULL,
    "MTP and attention are recomputed": {"mtp_num_layers": 1, **SELECTIVE},
    "MTP and layers are recomputed": {"mtp_num_layers": 1, **FULL},
}


def _alone(rank: int, size: int) -> list[str]:
    problems = []
    with client.megatron():
        from megatron.core.pipeline_parallel import get_forward_backward_func as reference
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, get_moe_layer_wise_logging_tracker
        from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper

        for name, fields in CASES.items():
            loss_func = client.by_tokens if "calculate_per_token_loss" in fields else client.mean
            found: list[tuple[Any, Any]] = []
            for function in (reference(), get_forward_backward_func()):
                model = client.build(**fields)
                MoEAuxLossAutoScaler.main_loss_backward_scale = mark = torch.full((1,), 7.0)
                MTPLossAutoScaler.main_loss_backward_scale = mark
                losses = client.call(function, model, M, loss_func)
                found.append((losses, client.gradients(model)))
                MTPLossLoggingHelper.tracker.clear()
                get_moe_layer_wise_logging_tracker().clear()
            for scaler in (MoEAuxLossAutoScaler, MTPLossAutoScaler):
                if scaler.main_loss_backward_scale is not mark or float(mark) != 7:
                    problems.append(f"{name}: {scaler.__name__} is left at {scaler.main_loss_backward_scale}")
            problems += [f"{name}: {p}" for p in models.equal(found[0][1], found[1][1])]
            if found[0][0] != found[1][0]:
                problems.append(f"{name}: losses {found}")
    return problems


def test_gradients_are_those_of_megatrons_schedule() -> None:
    assert run(_alone, 1, timeout=200) == [[]]


def _two_stages(rank: int, size: int) -> list[str]:
    with client.megatron(pipeline_model_parallel_size=2):
        from megatron.core.pipeline_parallel import get_forward_backward_func as reference

        found = []
        for function in (reference(), get_forward_backward_func()):
            model = client.build(pp=2, moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.5)
            losses = client.call(function, model, M)
            found.append((function.__name__, len(losses), losses, client.gradients(model)))
        (name, count, losses, expected), (own_name, _, own_losses, own) = found
        right = name == own_name and count == rank * M and losses == own_losses
        problems = [] if right else [f"{name} {losses}, {own_name} {own_losses}"]
        return problems + models.equal(expected, own)


def test_groups_are_megatrons_own_by_default() -> None:
    assert run(_two_stages, 2, timeout=200) == [[]] * 2


class Mixed(nn.Module):
    """An MLP made of this project's experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(4, client.HIDDEN))
        self.experts = GroupedExperts(4, client.HIDDEN, 24)

    def forward(self, x: Tensor, *more: object, **named: object) -> tuple[Tensor, None]:
        tokens = x.reshape(-1, client.HIDDEN)
        weights, indices = (tokens @ self.gate.t()).softmax(-1).topk(2, -1)
        return self.experts(tokens, indices, weights).view_as(x), None


def _mixed(rank: int, size: int) -> list[str]:
    problems = []
    with client.megatron():
        shim.fuse_weight_gradients()
        for fused in (False, True):
            for name, more in {"": {}, "one layer": {"layers": 1}, "selective": SELECTIVE, "full": FULL}.items():
                fields: dict[str, Any] = {"mixed": Mixed, "gradient_accumulation_fusion": fused, **more}
                expected, model = client.build(**fields), client.build(**fields)
                for batch in client.batches(M):
                    (expected(**batch).mean() / M).backward()
                schedule = "combined_1f1b_schedule_for_no_pipelining"
                client.call(get_forward_backward_func(schedule=schedule), model, M)
                differing = models.equal(client.gradients(expected), client.gradients(model))
                problems += [f"{name}, fused {fused}: {parameter}" for parameter in differing]
    return problems


def test_experts_in_megatrons_layers_with_fused_weight_gradients() -> None:
    assert run(_mixed, 1, timeout=200) == [[]]
