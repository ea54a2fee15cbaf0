"""Losses, scales of attached losses, and when gradients are reduced, against a plain loop."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlap1f1b.engine import EngineOptions
from overlap1f1b.integrations.megatron import ProcessGroups, get_forward_backward_func
from overlap1f1b.integrations.megatron.chunk import Repeating
from overlap1f1b.integrations.megatron.step import logged
from tests import models
from tests.engines import COSTS
from tests.integrations.megatron.chunks import (
    LAYERS,
    Part,
    Wrapped,
    build,
    call,
    combined,
    fake,
    forward_step,
    items,
    plain,
    with_config,
)
from tests.ranks import over


def test_grad_scale_func_of_a_wrapped_chunk_scales_gradients_and_no_report() -> None:
    function, part, _ = with_config(grad_scale_func=lambda loss: loss * 8)
    (reference,), data = build(1), items(3)
    losses = plain([reference], data, scale=8.0)
    assert [report["loss"] for report in call(function, [Wrapped(part)], data)] == losses  # type: ignore[list-item]
    assert models.equal(models.gradients(part), models.gradients(reference)) == []


@over(2)
def test_context_parallel_ranks_multiply_the_loss(rank: int, size: int) -> None:
    function = get_forward_backward_func(
        pg_collection=ProcessGroups(cp=dist.group.WORLD), options=EngineOptions(costs=COSTS)
    )
    (part,), (reference,) = build(1), build(1)
    call(function, [part], items(3))
    plain([reference], items(3), scale=float(size))
    problems = models.equal(models.gradients(part), models.gradients(reference))
    assert not problems, problems


@pytest.mark.parametrize("grad_sync", [False, True])
def test_only_last_contributions_are_outside_of_no_sync(grad_sync: bool) -> None:
    inside, synced = [0], []

    @contextmanager
    def no_sync() -> Iterator[None]:
        inside[0] += 1
        yield
        inside[0] -= 1

    def sync(parameters: Iterator[nn.Parameter]) -> None:
        synced.append((len(list(parameters)), inside[0], {name: len(made) for name, made in fired.items()}))

    function, part, config = with_config(no_sync_func=no_sync)
    if grad_sync:
        config.grad_sync_func = sync
    fired: dict[str, list[bool]] = {}
    for name, parameter in part.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: fired.setdefault(name, []).append(inside[0] > 0)
        )
    call(function, [part], items(5))
    assert inside == [0]
    assert fired == dict.fromkeys(dict(part.named_parameters()), [True] * 4 + [grad_sync])
    assert synced == ([(len(fired), 0, dict.fromkeys(fired, 5))] if grad_sync else [])


class Attaches(Part):
    """Notes the scales of Megatron-Core's attached losses in the backward."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = super().forward(tokens)
        x.register_hook(lambda grad: self.seen.append([float(scaler.main_loss_backward_scale) for scaler in self.of]))
        return x


@pytest.mark.parametrize(
    ("per_token", "fails", "takes"),
    [(False, False, False), (True, False, True), (False, True, True), (True, True, False)],
)
def test_attached_losses_have_megatrons_scale_for_a_step(
    monkeypatch: pytest.MonkeyPatch, per_token: bool, fails: bool, takes: bool
) -> None:
    before = torch.tensor(7.0)
    scalers = [SimpleNamespace(main_loss_backward_scale=before) for _ in range(3)]
    fake(monkeypatch, "megatron.core.transformer.moe.moe_utils", MoEAuxLossAutoScaler=scalers[0])
    fake(monkeypatch, "megatron.core.transformer.multi_token_prediction", MTPLossAutoScaler=scalers[1])
    fake(
        monkeypatch, "megatron.core.transformer.experimental_attention_variant.dsa", DSAIndexerLossAutoScaler=scalers[2]
    )
    config = SimpleNamespace(
        calculate_per_token_loss=per_token, grad_scale_func=lambda loss: loss * 6, num_moe_experts=8,
        mtp_num_layers=1, mtp_grad_scale_func=lambda: torch.tensor(12.0),
    )  # fmt: skip
    taken = list[float]()
    if takes:  # with a variant or without
        config.experimental_attention_variant_loss_scale_func = lambda scale: taken.append(float(scale))
    if takes and fails:
        config.experimental_attention_variant = "dsa"
    groups = SimpleNamespace(cp=SimpleNamespace(size=lambda: 2))
    function = get_forward_backward_func(pg_collection=groups, options=EngineOptions(costs=COSTS))
    monkeypatch.setattr("overlap1f1b.integrations.megatron.forward_backward.playing_alike", lambda groups: [])
    monkeypatch.setattr("overlap1f1b.integrations.megatron.forward_backward.limit_inner", lambda *_: None)
    part = Attaches(list(models.build(layers=LAYERS)), config, first=True, last=True)
    part.of, part.seen = scalers, []  # type: ignore[assignment]
    if fails:
        with pytest.raises(ValueError, match="loss_func returns float"):
            call(function, [part], items(3), forward_step_func=partial(forward_step, function=lambda target, out: 1.0))
    else:
        call(function, [part], items(3))
        # The third is not in use; ranks along "cp" have a part of the first each.
        assert part.seen == [[6.0, 12.0, 7.0] if per_token else [6.0 * 2 / 3, 12.0 / 3, 7.0]] * 3
    assert taken == [6.0 if per_token else 6.0 * 2 / 3] * takes
    assert all(scaler.main_loss_backward_scale is before for scaler in scalers)
    assert float(before) == 7


@dataclass
class Entry:
    """What Megatron-Core 0.19 logs of one kind of loss."""

    values: Tensor


class Logs(Part):
    """Logs a loss in a tracker that is made in the first forward, as Megatron-Core's later releases do."""

    def forward(self, tokens: Tensor) -> Tensor:
        self.log(sys.modules["megatron.core.transformer.moe.moe_logging"])
        return super().forward(tokens)

    def log(self, module: Any) -> None:
        metrics = module.get_moe_metrics_tracker().metrics
        metrics.setdefault("z_loss", Entry(torch.zeros(2))).values[1] += 1


def test_entries_that_are_dataclasses_log_a_compared_step_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a checkpoint runs the forward again."""

    def get() -> SimpleNamespace:
        module._MOE_METRICS_TRACKER = module._MOE_METRICS_TRACKER or SimpleNamespace(metrics={})
        return module._MOE_METRICS_TRACKER

    name = "megatron.core.transformer.moe.moe_logging"
    module = fake(monkeypatch, name, _MOE_METRICS_TRACKER=None, get_moe_metrics_tracker=get)
    function, part = combined(), Logs(list(models.build(layers=LAYERS)), None, first=True, last=True)
    for step in range(2):
        call(function, [part], items(3, seed=step))
        assert get().metrics["z_loss"].values.tolist() == [0, 3 * (step + 1)]
    random = SimpleNamespace(_get_all_rng_states=tuple, _set_all_rng_states=lambda *_: None)
    with Repeating(random, list(logged())):
        part.log(module)
    assert get().metrics["z_loss"].values.tolist() == [0, 6]
