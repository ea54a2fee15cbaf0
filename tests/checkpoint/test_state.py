"""A whole training run: schedules, dataloaders and random numbers go on to the bit; states that do not fit."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim.lr_scheduler import OneCycleLR

from overlap1f1b.checkpoint import load_checkpoint, save_checkpoint
from overlap1f1b.schedule import build_schedule
from tests import models
from tests.engines import COSTS, make
from tests.ranks import Ranks, over
from tests.tiers import wide


class Loader:
    """Batches in an order of its own on each shard of the data."""

    def __init__(self, shard: int) -> None:
        self.source, self.served = torch.Generator().manual_seed(shard), 0

    def __next__(self) -> tuple[Tensor, Tensor]:
        self.served += 1
        rows = torch.randint(models.V, (2, 4, 8), generator=self.source)
        return rows[0], rows[1]

    def state_dict(self) -> dict[str, Any]:
        return {"source": self.source.get_state(), "served": self.served}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.source.set_state(state["source"])
        self.served = state["served"]


def placed(layout: dict[str, int]) -> tuple[DeviceMesh | None, dist.ProcessGroup | None, int]:
    """A mesh, the ranks that share experts, and the number of this rank's shard of the data; over no ranks none."""
    if not layout:
        return None, None, 0
    mesh = init_device_mesh("cpu", tuple(layout.values()), mesh_dim_names=tuple(layout))
    at = dict(zip(layout, mesh.get_coordinate() or (), strict=True))
    group = mesh.get_group("ep") if layout.get("ep", 1) > 1 else None
    return mesh, group, at.get("dp", 0) * layout.get("ep", 1) + at.get("ep", 0)


class Run:
    """Training with dropout, a schedule of the learning rate, and numbers of Python and NumPy in every batch."""

    def __init__(self, layout: dict[str, int], *, seed: int = 0) -> None:
        mesh, group, shard = placed(layout)
        model = models.build(group, layers=2, dropout=0.3)
        program = build_schedule("1f1b", ranks=layout.get("pp", 1), microbatches=2)
        self.engine = make(model, program, mesh=mesh, costs=COSTS, timeout=30.0)
        self.optimizer = torch.optim.AdamW(self.engine.parameters())
        self.scheduler = OneCycleLR(self.optimizer, max_lr=0.1, total_steps=20)
        self.loader = Loader(shard)
        data = sum(layout.get(name, 1) - 1 for name in ("dp", "ep")) and shard
        for seeded in (torch.manual_seed, random.seed, np.random.seed):
            seeded(seed + 10 * data)

    @property
    def state(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler, "loader": self.loader}

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            inputs, target = next(self.loader)
            inputs = (inputs + random.randrange(5) + np.random.randint(5)) % models.V
            losses.append(self.engine.mean_loss(self.engine.step(inputs, target=target)))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
        return losses

    def whole(self) -> dict[str, Any]:
        """Everything that goes on."""
        found: dict[str, Any] = {"rates": [group["lr"] for group in self.optimizer.param_groups]}
        for n, p in enumerate(self.engine.parameters()):
            found[f"{n}"] = p.detach().clone()
            found |= {
                f"{n}.{entry}": torch.as_tensor(value).clone() for entry, value in self.optimizer.state[p].items()
            }
        return found

    def save(self, folder: Path, step: int = 3, **options: Any) -> Any:
        return save_checkpoint(self.engine, folder, step, self.optimizer, **({"state": self.state} | options))

    def load(self, folder: Path, **options: Any) -> int:
        return load_checkpoint(self.engine, folder, self.optimizer, **({"state": self.state} | options))


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[key], other[key]) if isinstance(one[key], Tensor) else one[key] == other[key] for key in one
    )


def _resume(rank: int, size: int, folder: Path, layouts: list[dict[str, int]]) -> list[tuple[bool, bool, bool]]:
    """The second one saves in the background."""
    found = []
    for number, layout in enumerate(layouts):
        background, first = number == 1, Run(layout)
        first.train(2)
        saving = first.save(folder / str(number), background=background)
        unbroken = first.train(2)
        if background:
            saving.result()
        again = Run(layout, seed=7)
        again.train(1)
        assert again.load(folder / str(number)) == 3
        resumed = again.train(2)
        same = equal(again.whole(), first.whole())
        again.load(folder / str(number), state=again.state | {"random": None})  # the losses depend on it
        found.append((resumed == unbroken, same, again.train(2) != unbroken))
    return found


@pytest.mark.parametrize(
    ("size", "layouts"),
    [
        (2, [{"pp": 2}, {"ep": 2}]),
        *wide(
            (4, [{"pp": 2, "ep": 2}, {"dp": 2, "ep": 2}]),
            (4, [{"ep": 2, "tp": 2}]),
            (1, [{}, {}]),
        ),
    ],
)
def test_a_resumed_run_is_the_run_that_never_stopped(
    kept: dict[int, Ranks], tmp_path: Path, size: int, layouts: list[dict[str, int]]
) -> None:
    every = kept[size].run(_resume, tmp_path, layouts) if size > 1 else [_resume(0, 1, tmp_path, layouts)]
    for found in every:
        assert found == [(True, True, True)] * len(layouts)


@over(2)
def test_another_layout_reads_what_is_the_same_on_all_ranks(rank: int, size: int, tmp_path: Path) -> None:
    saved = Run({"ep": 2})
    saved.train(1)
    saved.save(tmp_path)
    names = {path.name for path in (tmp_path / "step-00000003").glob("state-*")}
    each = {f"state-{name}-{rank:05d}.pt" for name in ("random", "loader") for rank in range(2)}
    assert names == {"state-scheduler.pt"} | each
    run = Run({"dp": 2})
    with pytest.raises(ValueError, match=r"^[^\n]*$") as refused:
        run.load(tmp_path)
    assert str(refused.value).endswith(
        "it has a state['loader'] of each rank of pp 1 × dp 1 × ep 2, this run has pp 1 × dp 2 × ep 1; "
        "allowed: the same layout, or None to leave the state"
    )
    before = torch.get_rng_state()
    run.load(tmp_path, state={"scheduler": run.scheduler, "loader": None})
    assert torch.equal(torch.get_rng_state(), before)
    assert run.optimizer.param_groups[0]["lr"] == saved.optimizer.param_groups[0]["lr"]
    assert run.scheduler.last_epoch == 1


def test_states_that_do_not_fit(tmp_path: Path) -> None:
    run = Run({})
    path = run.save(tmp_path, state={"scheduler": run.scheduler}).result()
    start = re.escape(f"checkpoint {path}: it has ")
    with pytest.raises(ValueError, match=start + r"no state\['loader'\]; allowed: random, scheduler$"):
        run.load(tmp_path)
    with pytest.raises(ValueError, match=start + r"state\['scheduler'\], this run has none; allowed: an object for"):
        run.load(tmp_path, state=None)
    assert run.load(tmp_path, state={"scheduler": None}) == 3
    for name in ("", "a/b", "../x", 5):
        with pytest.raises(ValueError, match=r"state has the name .*; allowed: a letter, then letters, digits and _"):
            run.save(tmp_path, state={name: run.scheduler})
    with pytest.raises(ValueError, match=r"state\['loader'\] is of type list; allowed: an object with state_dict"):
        run.save(tmp_path, state={"loader": []})
    run.loader.served = run.engine  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"^state\['loader'\] cannot be stored: [^\n]*; allowed: tensors, numbers"):
        run.save(tmp_path)


@over(2)
def test_other_names_on_another_rank(rank: int, size: int, tmp_path: Path) -> None:
    run = Run({"ep": 2})
    text = r"^[^\n]*only one of ranks 0 and 1 has state\['loader'\]; allowed: the same names on all ranks$"
    with pytest.raises(ValueError, match=text):
        run.save(tmp_path, state={"loader": run.loader} if rank else {})
