"""Every node of a plan has its method."""

from __future__ import annotations

from collections import Counter
from typing import Any, get_args

import pytest

from overlap1f1b.engine import Stage
from overlap1f1b.engine.play.player import compute
from overlap1f1b.engine.run.block import BlockRun
from overlap1f1b.engine.run.recompute import RecomputedRun
from overlap1f1b.plan import Chains, Node, Recompute, Resource
from overlap1f1b.schedule import Action, Kind, Placement
from tests import models

METHODS = ("run_forward", "run_backward", "recompute_experts", "recompute_attention")


@pytest.mark.parametrize("recompute", get_args(Recompute))
def test_each_node_calls_one_method_of_its_block(monkeypatch: pytest.MonkeyPatch, recompute: Recompute) -> None:
    called: list[tuple[str, int]] = []

    def noted(name: str) -> Any:
        return lambda run, *given: called.append((name, run.block))

    for method in METHODS:
        monkeypatch.setattr(RecomputedRun if "recompute" in method else BlockRun, method, noted(method))
    stage = Stage(models.build(), recompute=recompute)
    microbatch = stage.microbatch(models.batch(1)[0])
    chains = Chains(Placement(((0,),)), [stage.shape])
    every: list[Node] = [*chains.of(Action(Kind.F, 0, 0)), *chains.of(Action(Kind.B, 0, 0))]
    expected = []
    for node in every:
        if node.kind is not Kind.W and node.resource is Resource.COMPUTE:
            compute(node, microbatch, {})
            expected.append(node.block)
    assert [block for _, block in called] == expected
    count = Counter(name for name, _ in called)
    assert set(count) <= set(METHODS)
    assert count["run_forward"] == 2 * 3 + 3
    assert count["run_backward"] == 2 * 3 + 3
    assert count["recompute_experts"] == (2 if recompute in ("experts", "block") else 0)
    assert count["recompute_attention"] == (5 if recompute in ("attention", "block") else 0)
