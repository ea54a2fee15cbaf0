"""Losses, scales of attached losses, and when gradients are reduced, against a plain loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlap1f1b.engine import EngineOptions
from overlap1f1b.integrations.megatron import ProcessGroups, get_forward_backward_func
from tests import models
from tests.engines import COSTS
from tests.integrations.megatron.chunks import (
    LAYERS,
    Part,
    Wrapped,
    build,
    call,
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
        monkeypatch,
        "megatron.core.transformer.experimental_attention_variant.dsa",
        DSAIndexerLossAutoScaler=scalers[2],
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
