"""Every node of a plan has its method."""

from __future__ import annotations

from collections import Counter
from typing import get_args

import pytest

from overlap1f1b.engine import Stage
from overlap1f1b.engine.run import nodes
from overlap1f1b.engine.run.block import BlockRun
from overlap1f1b.engine.run.recompute import RecomputedRun
from overlap1f1b.plan import Chains, Node, Recompute, Resource
from overlap1f1b.schedule import Action, Kind, Placement
from tests import models

METHODS = (
    "attention_f", "experts_f", "aggregate_f", "aggregate_b", "experts_b", "attention_b", "dense_b",
    "recompute_experts", "recompute_attention", "post",
)  # fmt: skip


@pytest.mark.parametrize("recompute", get_args(Recompute))
def test_each_node_calls_one_method_of_its_block(monkeypatch: pytest.MonkeyPatch, recompute: Recompute) -> None:
    called: list[tuple[str, int]] = []
    for name in METHODS:
        for home in (BlockRun, RecomputedRun):
            if name in vars(home):
                monkeypatch.setattr(home, name, lambda run, *given, name=name: called.append((name, run.block)))
    stage = Stage(models.build(), recompute=recompute)
    microbatch = stage.microbatch(models.batch(1)[0])
    chains = Chains(Placement(((0,),)), [stage.shape])
    every: list[Node] = [*chains.of(Action(Kind.F, 0, 0)), *chains.of(Action(Kind.B, 0, 0))]
    expected = []
    for node in every:
        if node.kind is Kind.W:
            continue
        if node.resource is Resource.COMPUTE:
            nodes.compute(node, microbatch, None)
        else:
            nodes.post(node, microbatch)
        expected.append(node.block)
    assert [block for _, block in called] == expected
    count = Counter(name for name, _ in called)
    assert count["post"] == 2 * (3 + 2)  # of two blocks: counts, dispatch, combine forward; both ways backward
    assert count["experts_f"] == count["experts_b"] == count["aggregate_f"] == count["aggregate_b"] == 2
    assert count["attention_f"] == 5
    assert (count["attention_b"], count["dense_b"]) == (2, 3)
