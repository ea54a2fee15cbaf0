"""Nodes are played in order, observed, and counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch

from overlap1f1b.engine import Engine
from overlap1f1b.plan import Node, NodeCosts, Resource
from overlap1f1b.schedule import Kind, build_schedule
from tests import models

COSTS = NodeCosts.uniform(attention=3, experts=4, dispatch=5)


def engine(model: Any, name: str = "combined_1f1b", microbatches: int = 4) -> Engine:
    program = build_schedule(name, microbatches=microbatches)
    return Engine(model, program, loss_fn=models.loss_fn, costs=COSTS)


def test_around_and_before_launch_see_every_node_in_the_plans_order() -> None:
    played, (inputs, target) = engine(models.build()), models.batch(4)
    seen: list[Node | str] = []

    @contextmanager
    def around(node: Node) -> Iterator[None]:
        seen.append(node)
        yield

    played.player.around = around
    played.player.before_launch = lambda: seen.append("exchange")
    played.step(inputs, target=target)
    nodes = played.plan.ranks[0]
    assert seen == [node if node.resource is Resource.COMPUTE else "exchange" for node in nodes]


def test_peaks_are_the_plans() -> None:
    for name in ("sequential", "combined_1f1b", "afab", "zb_h1"):
        played, (inputs, target) = engine(models.build(), name), models.batch(4)
        result = played.step(inputs, target=target)
        assert result.peak_activations == played.program.peak_activations[0]
        assert result.peak_held <= played.plan.peak_held


def test_spans_cover_every_node_and_follow_the_order_of_compute() -> None:
    played, (inputs, target) = engine(models.build()), models.batch(4)
    spans = played.step(inputs, target=target).overlap.spans
    assert {span.node for span in spans} == set(played.plan.ranks[0])
    computed = [span for span in spans if span.node.resource is Resource.COMPUTE]
    assert all(a.end <= b.start for a, b in pairwise(computed))


def test_a_backward_runs_outside_the_autocast_of_its_step() -> None:
    played, (inputs, target) = engine(models.build()), models.batch(4)
    enabled: dict[Kind, set[bool]] = {}

    @contextmanager
    def around(node: Node) -> Iterator[None]:
        enabled.setdefault(node.kind, set()).add(torch.is_autocast_enabled("cpu"))
        yield

    played.player.around = around
    with torch.autocast("cpu", dtype=torch.bfloat16):
        played.step(inputs, target=target)
    assert enabled == {Kind.F: {True}, Kind.I: {False}, Kind.W: {False}}


def test_the_position_of_a_node_that_fails_is_known() -> None:
    played, (inputs, target) = engine(models.build()), models.batch(4)

    @contextmanager
    def around(node: Node) -> Iterator[None]:
        if node.kind is Kind.W:
            raise KeyError("mine")
        yield

    played.player.around = around
    with pytest.raises(KeyError, match="mine") as raised:
        played.step(inputs, target=target)
    position = next(at for at, node in enumerate(played.plan.ranks[0]) if node.kind is Kind.W)
    assert played.player.position == position
    assert any(f"position {position} of its plan" in note for note in raised.value.__notes__)
