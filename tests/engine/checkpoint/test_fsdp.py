"""Checkpoints of parameters under FSDP2: the same bits back, and over other layouts, with and without FSDP2."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from overlap1f1b.engine import consolidate, load_checkpoint, save_checkpoint
from overlap1f1b.schedule import build_schedule
from tests import models
from tests.engine.checkpoint.test_resuming import OPTIMIZERS
from tests.engine.checkpoint.test_resuming import Run as PlainRun
from tests.engine.reduce.test_fsdp import engine_over, sliced, wrapped
from tests.ranks import Ranks, over


class Run(PlainRun):
    """Training under FSDP2, or without if ``wrap`` is empty, on the same rows in every layout."""

    def __init__(self, wrap: str, layout: dict[str, int], optimizer: str = "AdamW", *, lr: float = 0.02) -> None:
        mesh, self.shard, self.shards = None, 0, 1
        if layout:
            mesh = init_device_mesh("cpu", tuple(layout.values()), mesh_dim_names=tuple(layout))
            dp, ep = (mesh[name].get_local_rank() for name in ("dp", "ep"))
            self.shard, self.shards = dp * layout["ep"] + ep, layout["dp"] * layout["ep"]
        if wrap:
            assert mesh is not None
            model = wrapped(wrap, mesh["dp", "ep"])
        else:
            model = models.build(None if mesh is None or layout["ep"] == 1 else mesh.get_group("ep"))
        program = build_schedule("1f1b", ranks=layout.get("pp", 1), microbatches=2)
        self.engine = engine_over(model, program, mesh, overlap="serial")
        every = list(self.engine.parameters())
        split = [
            {"params": [p for p in every if (p.ndim > 1) == wide], "lr": lr * (1 + wide)} for wide in (True, False)
        ]
        self.optimizer = OPTIMIZERS[optimizer](split)

    def whole(self) -> list[Tensor]:
        """This rank's parts of everything."""
        found = []
        for p in self.engine.parameters():
            for _, value in (("", p.detach()), *sorted(self.optimizer.state[p].items())):
                found.append((value.to_local() if isinstance(value, DTensor) else torch.as_tensor(value)).clone())
        return found


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(*pair) for pair in zip(one, other, strict=True))


FOUR = {"dp": 2, "ep": 2}


LAYOUTS: list[tuple[bool, dict[str, int]]] = [  # with FSDP2 or without
    (False, FOUR), (True, {"dp": 4, "ep": 1}), (True, {"dp": 1, "ep": 4}), (False, {"pp": 2, "dp": 1, "ep": 2}),
]  # fmt: skip


def _goes_round(rank: int, size: int, wrap: str, name: str, others: list[int], folder: Path) -> list[list[float]]:
    """The losses behind a checkpoint, those over other layouts, and those of the last, back in the first layout.

    Of one way to wrap it is written in the background, and the files only when two more steps are done.
    """
    back = run = Run(wrap, FOUR, name)
    run.train(1)
    saved, write, trained = run.whole(), FileSystemWriter.write_data, threading.Event()

    def late(*args: Any) -> Any:
        assert trained.wait(20)
        return write(*args)

    with patch.object(FileSystemWriter, "write_data", late if wrap == "hybrid" else write):
        saving = run.save(folder, background=wrap == "hybrid")
        found = [run.train(2)]
        trained.set()
        if wrap == "hybrid":
            saving.result()
    ended = back.whole()
    for group in back.optimizer.param_groups:
        group["lr"] = 3.0
    assert back.load(folder) == 2
    assert equal(back.whole(), saved)
    assert back.train(2) == found[0]
    assert equal(back.whole(), ended)
    source = folder
    for number in others:
        wrapped, layout = LAYOUTS[number]
        run = Run(wrap * wrapped, layout, name, lr=3.0)
        run.load(source)
        run.save(source := folder.with_name(f"{folder.name}-{number}"))
        found.append(run.train(2))
    back.load(source)
    return [*found, back.train(2)]


CASES = [  # with the layouts over which the checkpoint goes, by their places
    ("blocks", "AdamW", [0]),
    ("blocks", "AdamW", [2]),
    ("hybrid", "momentum", [3]),
    ("replicate", "AdamW", [1]),
    ("some", "step", [0]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("wrap", "name", "others"), CASES)
def test_a_checkpoint_goes_round_over_other_layouts(
    ranks4: Ranks, tmp_path: Path, wrap: str, name: str, others: list[int]
) -> None:
    (first, *_), *_ = every = ranks4.run(_goes_round, wrap, name, others, tmp_path / "first")
    for losses in every:
        assert losses[0] == losses[-1] == first
        for one in losses:
            assert one == pytest.approx(first, rel=2e-5)
    alone = Run("", {}, name, lr=3.0)
    alone.load(tmp_path / f"first-{others[-1]}")
    assert alone.train(2) == pytest.approx(first, rel=2e-5)


def _not_summed(rank: int, size: int, folder: Path) -> str:
    run = Run("blocks", FOUR, "rows")
    run.train(2)
    with pytest.raises(ValueError, match=r"^[^\n]*$") as refused:
        run.save(folder)
    return str(refused.value)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch sums this state at once")
def test_a_state_that_ranks_have_not_summed(ranks4: Ranks, tmp_path: Path) -> None:
    for text in ranks4.run(_not_summed, tmp_path):
        assert re.search(r"the optimizer's sum of \S+ has placements \(.*\); allowed: shards or copies$", text)


@over(4, gives=True)
def test_ranks_without_a_row(rank: int, size: int, tmp_path: Path) -> bool:
    """One expert for each rank along "ep", so that the second rank along "dp" has no row of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "E", 2)
        run = Run("blocks", FOUR)
        run.train(1)
        assert any(p.to_local().numel() == 0 for p in run.engine.parameters()) == (run.shard >= 2)
        run.save(tmp_path)
        again = Run("blocks", FOUR, lr=3.0)
        again.load(tmp_path)
        return equal(run.whole(), again.whole())


def _slices_of_a_tensor(rank: int, size: int, folder: Path) -> bool:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
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
                parts.append([p.detach().to_local().clone() for p in engine.parameters()])  # type: ignore[attr-defined]
    return equal(*parts)


def test_experts_that_are_slices_of_a_tensor(ranks4: Ranks, tmp_path: Path) -> None:
    assert ranks4.run(_slices_of_a_tensor, tmp_path) == [True] * 4
    consolidate(tmp_path, tmp_path / "whole")
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    assert whole["0.experts.weight"].shape == (2, models.H, models.H)
