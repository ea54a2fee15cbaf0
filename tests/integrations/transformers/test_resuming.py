"""A run that stops and goes on over other ranks continues with the same losses, optimizer and ties included."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("transformers")

from overlap1f1b.engine import load_checkpoint, save_checkpoint
from overlap1f1b.integrations.transformers import split_model
from overlap1f1b.schedule import build_schedule
from tests.integrations.transformers import tiny
from tests.ranks import Ranks

STEPS = 2
ROWS = 8


class Run:
    """Training of a tied Mixtral on the same rows in every step, whatever the layout."""

    def __init__(self, layout: dict[str, int], schedule: str, seed: int = 3) -> None:
        ranks, mesh = layout.get("pp", 1), None
        self.shards, self.shard = layout.get("dp", 1) * layout.get("ep", 1), 0
        if layout:
            mesh = init_device_mesh("cpu", tuple(layout.values()), mesh_dim_names=tuple(layout))
            at = dict(zip(layout, mesh.get_coordinate() or (), strict=True))
            self.shard = at.get("dp", 0) * layout.get("ep", 1) + at.get("ep", 0)
        program = build_schedule(schedule, ranks=ranks, microbatches=4 if schedule == "dualpipev" else 2)
        self.stages = split_model(tiny.build("mixtral", seed=seed, tie_word_embeddings=True), program, mesh)
        self.engine = tiny.engine(self.stages, program, mesh)
        self.fresh()

    def fresh(self) -> None:
        self.optimizer = torch.optim.AdamW(self.stages.parameters(), lr=3e-3, eps=1e-5)

    def train(self) -> list[float]:
        losses = []
        for _ in range(STEPS):
            tokens, labels = (rows.chunk(self.shards)[self.shard] for rows in tiny.batch(ROWS))
            losses.append(self.engine.mean_loss(self.engine.step(tokens, target=labels)))
            self.engine.clip_gradients(1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return losses

    def save(self, folder: Path, step: int) -> None:
        save_checkpoint(self.engine, folder, step, self.optimizer, config={"rows": ROWS})

    def load(self, folder: Path) -> int:
        return load_checkpoint(self.engine, folder, self.optimizer, config={"rows": ROWS})


def _over_four(rank: int, size: int, start: Path, folder: Path) -> dict[str, list[float]]:
    """Continue one rank's checkpoint over stages and experts, over copies of them, and with both ends on a rank."""
    losses = {}
    source = start
    for name, schedule, layout in (
        ("pp × ep", "combined_1f1b", {"pp": 2, "ep": 2}),
        ("dp × ep", "combined_1f1b", {"dp": 2, "ep": 2}),
        ("both ends", "dualpipev", {"dp": 2, "pp": 2}),
    ):
        run = Run(layout, schedule, seed=4)
        assert run.load(source) == STEPS
        run.save(source := folder / name, STEPS)
        losses[name] = run.train()
    return losses


def test_the_same_losses_over_other_ranks(ranks4: Ranks, tmp_path: Path) -> None:
    run = Run({}, "sequential")
    assert run.load(tmp_path / "one") == 0
    first = run.train()
    run.save(tmp_path / "one", STEPS)
    unbroken = run.train()
    assert run.load(tmp_path / "one") == STEPS
    assert run.train() == unbroken
    run.load(tmp_path / "one")
    run.fresh()
    assert run.train() != pytest.approx(unbroken, rel=1e-3)  # the optimizer's state counts
    assert unbroken[-1] < first[0]
    for losses in ranks4.run(_over_four, tmp_path / "one", tmp_path):
        assert losses == dict.fromkeys(losses, pytest.approx(unbroken, rel=1e-5))
    again = Run({}, "sequential", seed=4)
    assert again.load(tmp_path / "both ends") == STEPS
    assert again.train() == unbroken
