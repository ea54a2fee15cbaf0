"""Nothing of a step lives behind it: no object of the room of steps is alive, with Python's collector off."""

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch._dynamo  # a checkpoint would import it, which leaves frames in a circle
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from overlap1f1b.engine import Engine, EngineOptions
from overlap1f1b.moe import GroupedExperts
from overlap1f1b.play.observers import Observer
from overlap1f1b.schedule import build_schedule
from overlap1f1b.transport.calls import exchange
from tests.play.plain import HIDDEN, batch, engine_of, loss_fn
from tests.ranks import over


class Block(nn.Module):
    """Has experts, perhaps called in a checkpoint, and a tensor that crosses their exchanges."""

    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        self.gate, self.experts, self.checkpointed = nn.Linear(HIDDEN, 4), GroupedExperts(4, HIDDEN, 8), checkpointed
        self.dropout, self.calls = nn.Dropout(0.1), 0

    def run(self, x: Tensor) -> Tensor:
        self.calls += 1
        weights, indices = self.gate(x).softmax(-1).topk(2)
        return x + self.dropout(self.experts(x, indices, weights)) * x.tanh()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.run, x, use_reentrant=False) if self.checkpointed else self.run(x)  # type: ignore[no-any-return]


@contextmanager
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def alive() -> Counter[str]:
    """Count the objects of classes of overlap1f1b.play, but those who look on, which an engine keeps."""
    found: Counter[str] = Counter()
    for held in gc.get_objects():
        kind = type(held)
        if str(kind.__module__).startswith("overlap1f1b.play.") and not issubclass(kind, Observer):
            found[kind.__qualname__] += 1
    return found


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpoint"])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("recompute", ["none", "experts", "attention", "block"])
def test_nothing_of_a_step_lives_behind_it(recompute: Any, parts: int, checkpointed: bool) -> None:
    """In steps that measure, are compared, try plans, and in evaluations; outputs live as long as their result."""
    model = nn.Sequential(*(Block(checkpointed=checkpointed) for _ in range(2)), nn.Linear(HIDDEN, HIDDEN))
    program = build_schedule("combined_1f1b", microbatches=3, chunks=2)
    options = EngineOptions(recompute=recompute, parts=parts)
    x, target = torch.randn(2, 12, HIDDEN)
    with Engine(model, program, loss_fn=loss_fn, options=options) as engine, uncollected():
        before = alive()
        for step in range(6):
            result = engine.step(x, target=target, return_outputs=step % 2 == 0)
            assert len(result.outputs) == (3 if step % 2 == 0 else 0)
            del result
            assert alive() == before, step
        engine.evaluate(x, target=target)
        assert alive() == before, "evaluation"


class Own(nn.Module):
    """Exchanges rows by itself, there and back, and sets an attribute meanwhile."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group, self.gate, self.order = group, nn.Linear(HIDDEN, HIDDEN), torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        self.order = x.detach()[:, 0].argsort()
        rows = exchange(self.gate(x), None, None, self.group)
        return x + exchange(rows.tanh(), None, None, self.group)[self.order]


@over(2, timeout=60)
def test_nothing_of_exchanges_of_a_blocks_own_lives_behind_a_step(rank: int, size: int) -> None:
    mesh, data = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)), batch(rank)
    for recompute in ("none", "block"):
        model = nn.Sequential(*(Own(mesh.get_group("ep")) for _ in range(2)))
        with engine_of(model, mesh, recompute=recompute, overlap=3) as engine, uncollected():
            before = alive()
            for step in range(3):
                engine.step(data[0], target=data[1])
                assert alive() == before, (recompute, step)
