"""Checkpoints of parameters under FSDP2: the same bits back, and over other layouts, with and without FSDP2."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor, Partial, Shard

from overlap1f1b.checkpoint import consolidate, load_checkpoint, save_checkpoint
from overlap1f1b.schedule import build_schedule
from tests import models
from tests.checkpoint.runs import equal, placed
from tests.checkpoint.test_load_resuming import OPTIMIZERS
from tests.checkpoint.test_load_resuming import Run as PlainRun
from tests.checkpoint.test_save_background import held_back
from tests.ranks import Ranks, over
from tests.reduce.test_fsdp import engine_over, meshed, sliced, wrapped
from tests.tiers import wide


class Run(PlainRun):
    """Training under FSDP2, or without if ``wrap`` is empty, on the same rows in every layout."""

    def __init__(self, wrap: str, layout: dict[str, int], optimizer: str = "AdamW", *, lr: float = 0.02) -> None:
        self.shards = layout.get("dp", 1) * layout.get("ep", 1)
        mesh, group, self.shard = placed(layout)
        model = wrapped(wrap, mesh["dp", "ep"]) if wrap and mesh is not None else models.build(group)
        program = build_schedule("1f1b", ranks=layout.get("pp", 1), microbatches=2)
        self.engine = engine_over(model, program, mesh, overlap="serial")
        every = list(self.engine.parameters())
        split = [
            {"params": [p for p in every if (p.ndim > 1) == wide], "lr": lr * (1 + wide)} for wide in (True, False)
        ]
        self.optimizer = OPTIMIZERS[optimizer](split)

    def whole(self) -> dict[str, Any]:
        """This rank's parts of everything."""
        return {
            name: value.to_local().clone() if isinstance(value, DTensor) else value
            for name, value in super().whole().items()  # type: ignore[arg-type]
        }


TWO, FOUR = {"dp": 2, "ep": 1}, {"dp": 2, "ep": 2}


def _goes_round(
    rank: int, size: int, wrap: str, name: str, other: dict[str, int], plain: bool, folder: Path
) -> list[list[float]]:
    """The losses behind a checkpoint, those over another layout, and those of that, back in the first layout."""
    back = run = Run(wrap, TWO if size == 2 else FOUR, name)
    run.train(1)
    saved = run.whole()
    with held_back() as event:
        saving = run.save(folder, background=True)
        found = [run.train(2)]
        event.set()
        saving.result()
    ended = back.whole()
    for group in back.optimizer.param_groups:
        group["lr"] = 3.0
    assert back.load(folder) == 3
    assert equal(back.whole(), saved)
    assert back.train(2) == found[0]
    assert equal(back.whole(), ended)
    run = Run("" if plain else wrap, other, name, lr=3.0)
    run.load(folder)
    run.save(folder / "other")
    found.append(run.train(2))
    back.load(folder / "other")
    return [*found, back.train(2)]


CASES = [  # with another layout, and whether it is without FSDP2
    (2, "blocks", "AdamW", {"dp": 1, "ep": 2}, False),
    *wide(
        (4, "blocks", "AdamW", FOUR, True),
        (4, "blocks", "AdamW", {"dp": 1, "ep": 4}, False),
        (4, "hybrid", "momentum", {"pp": 2, "dp": 1, "ep": 2}, True),
        (4, "replicate", "AdamW", {"dp": 4, "ep": 1}, False),
        (4, "some", "step", FOUR, True),
    ),
]


@pytest.mark.parametrize(("size", "wrap", "name", "other", "plain"), CASES)
def test_a_checkpoint_goes_round_over_other_layouts(
    kept: dict[int, Ranks], tmp_path: Path, size: int, wrap: str, name: str, other: dict[str, int], plain: bool
) -> None:
    """And to one process without FSDP2."""
    (first, *_), *_ = every = kept[size].run(_goes_round, wrap, name, other, plain, tmp_path)
    for losses in every:
        assert losses[0] == losses[-1] == first
        for one in losses:
            assert one == pytest.approx(first, rel=2e-5)
    alone = Run("", {}, name, lr=3.0)
    alone.load(tmp_path / "other")
    assert alone.train(2) == pytest.approx(first, rel=2e-5)


@over(2)
def test_a_state_that_ranks_have_not_summed(rank: int, size: int, tmp_path: Path) -> None:
    run = Run("blocks", TWO)
    parameter = next(p for p in run.engine.parameters() if isinstance(p, DTensor))
    run.optimizer.state[parameter]["sum"] = DTensor.from_local(torch.ones(3), parameter.device_mesh, [Partial()])
    text = r"^[^\n]*the optimizer's sum of \S+ has placements \([^\n]*\); allowed: shards or copies$"
    with pytest.raises(ValueError, match=text):
        run.save(tmp_path)


@over(2)
def test_ranks_without_a_row(rank: int, size: int, tmp_path: Path) -> None:
    """One expert over two ranks along "dp", so that the second has no row of it."""
    with patch.object(models, "E", 1), patch.object(models, "K", 1):
        run = Run("blocks", TWO)
        run.train(1)
        assert any(p.to_local().numel() == 0 for p in run.engine.parameters()) == (run.shard >= 1)
        run.save(tmp_path)
        again = Run("blocks", TWO, lr=3.0)
        again.load(tmp_path)
        assert equal(run.whole(), again.whole())


def _slices_of_a_tensor(rank: int, size: int, folder: Path) -> bool:
    mesh = meshed(size, 2)
    x = torch.randn(4, 6, models.H, generator=torch.Generator().manual_seed(rank))
    parts = []
    for number in range(2):
        model = sliced(mesh, Shard(0))
        program = build_schedule("1f1b", microbatches=2)
        engine = engine_over(model, program, mesh, overlap="serial", loss_fn=lambda x, y: (x - y).square().mean())
        optimizer = torch.optim.AdamW(engine.parameters(), lr=0.1)
        if number == 1:
            load_checkpoint(engine, folder, optimizer)
        for step in range(3):  # the first finds the exchanges
            engine.step(x, target=-x)
            optimizer.step()
            optimizer.zero_grad()
            if (number, step) == (0, 1):
                save_checkpoint(engine, folder, 2, optimizer)
            if (number, step) in {(0, 2), (1, 0)}:
                parts.append({n: p.detach().to_local().clone() for n, p in enumerate(engine.parameters())})  # type: ignore[attr-defined]
    return equal(*parts)


@pytest.mark.wide  # such experts without FSDP2 are in reduce/test_sums_slices.py, and checkpoints under FSDP2 above
def test_experts_that_are_slices_of_a_tensor(ranks4: Ranks, tmp_path: Path) -> None:
    assert ranks4.run(_slices_of_a_tensor, tmp_path) == [True] * 4
    consolidate(tmp_path, tmp_path / "whole")
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    assert whole["0.experts.weight"].shape == (2, models.H, models.H)
