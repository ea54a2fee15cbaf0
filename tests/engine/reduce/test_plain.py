"""Sums of plain gradients over ranks."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from overlap1f1b.engine import Stage
from overlap1f1b.engine.reduce.plain import Reducer
from overlap1f1b.plan import Node, Op
from overlap1f1b.schedule import Kind
from overlap1f1b.transport.failures import Failures
from overlap1f1b.transport.lanes import Lane
from tests.ranks import Ranks


def _sums(rank: int, size: int) -> list[str]:
    problems: list[str] = []
    stage = Stage([nn.Linear(2, 2), nn.Linear(2, 2).double(), nn.Linear(2, 2)], reduce_own=True)
    apart = set(stage.own_parameters(2))
    lane = Lane("reduce", timedelta(seconds=20), Failures(), background=True)
    reducer = Reducer({0: stage}, dist.group.WORLD, None, lane, apart=apart)
    if not reducer.reduces or Reducer({0: stage}, None, None, lane).reduces:
        problems.append("what is reduced")
    blocks = [Node(Op.REDUCE, Kind.W, 0, block) for block in (1, 0, 2)]
    for block in range(3):
        for p in stage.own_parameters(block):
            p.grad = torch.full_like(p, 100.0)  # of an earlier step
    reducer.begin(blocks)
    for block in range(3):
        for p in stage.own_parameters(block):
            p.grad = torch.full_like(p, 1.0 + rank) if block or rank else None  # no token reached block 0 of rank 0
    if reducer.launch(blocks[1]):
        problems.append("a reduction has overtaken another")
    if [flight.node.block for flight in reducer.launch(blocks[0])] != [1, 0]:
        problems.append("reductions are not in the order of the plan")
    if reducer.launch(blocks[2]):
        problems.append("a parameter apart was reduced")
    reducer.settle()
    reducer.finish()
    expected = {0: 102.0, 1: 103.0, 2: 1.0 + rank}
    for block in range(3):
        for p in stage.own_parameters(block):
            if p.grad is None or not bool((p.grad == expected[block]).all()):
                problems.append(f"block {block}: {p.grad}, expected {expected[block]}")
    return problems


def test_blocks_are_reduced_in_the_plans_order_whatever_ends_first(ranks2: Ranks) -> None:
    assert ranks2.run(_sums) == [[], []]
