"""A whole training run: schedules, dataloaders and random numbers go on to the bit; states that do not fit."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.lr_scheduler import OneCycleLR

from overlap1f1b.engine import load_checkpoint, save_checkpoint
from overlap1f1b.schedule import build_schedule
from tests import models
from tests.engines import COSTS, make
from tests.ranks import Ranks


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


class Run:
    """Training with dropout, a schedule of the learning rate, and numbers of Python and NumPy in every batch."""

    def __init__(self, layout: dict[str, int], *, seed: int = 0) -> None:
        mesh, group, shard = None, None, 0
        if layout:
            mesh = init_device_mesh("cpu", tuple(layout.values()), mesh_dim_names=tuple(layout))
            group = mesh.get_group("ep") if layout.get("ep", 1) > 1 else None
            at = dict(zip(layout, mesh.get_coordinate() or (), strict=True))
            shard = at.get("dp", 0) * layout.get("ep", 1) + at.get("ep", 0)
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
        found = {f"{n}": p.detach().clone() for n, p in enumerate(self.engine.parameters())}
        found |= {
            f"{n}.{entry}": value.clone()
            for n, p in enumerate(self.engine.parameters())
            for entry, value in self.optimizer.state[p].items()
        }
        return found | {"rates": [group["lr"] for group in self.optimizer.param_groups]}

    def save(self, folder: Path, step: int = 3, **options: Any) -> Any:
        return save_checkpoint(self.engine, folder, step, self.optimizer, **({"state": self.state} | options))

    def load(self, folder: Path, **options: Any) -> int:
        return load_checkpoint(self.engine, folder, self.optimizer, **({"state": self.state} | options))


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[key], other[key]) if isinstance(one[key], Tensor) else one[key] == other[key] for key in one
    )


LAYOUTS = [{"pp": 2, "ep": 2}, {"dp": 2, "ep": 2}]


def _resume(rank: int, size: int, folder: Path, layouts: list[dict[str, int]]) -> list[tuple[bool, bool, bool]]:
    """The second one saves in the background."""
    found = []
    for number, layout in enumerate(layouts):
        background, first = number == 1, Run(layout)
        first.train(3)
        saving = first.save(folder / str(number), background=background)
        unbroken = first.train(3)
        if background:
            saving.result()
        again = Run(layout, seed=7)
        again.train(1)
        assert again.load(folder / str(number)) == 3
        resumed = again.train(3)
        same = equal(again.whole(), first.whole())
        again.load(folder / str(number), state=again.state | {"random": None})  # the losses depend on it
        found.append((resumed == unbroken, same, again.train(3) != unbroken))
    return found


@pytest.mark.parametrize(
    "layouts", [LAYOUTS, [{"ep": 2, "tp": 2}], [{}, {}]], ids=["four ranks", "tensor ranks", "one rank"]
)
def test_a_resumed_run_is_the_run_that_never_stopped(
    ranks4: Ranks, tmp_path: Path, layouts: list[dict[str, int]]
) -> None:
    every = ranks4.run(_resume, tmp_path, layouts) if layouts[0] else [_resume(0, 1, tmp_path, layouts)]
    for found in every:
        assert found == [(True, True, True)] * len(layouts)


def _other_layout(rank: int, size: int, folder: Path) -> tuple[str, float, int, bool]:
    run = Run({"dp": 4})
    with pytest.raises(ValueError, match=r"^[^\n]*$") as refused:
        run.load(folder)
    before = torch.get_rng_state()
    run.load(folder, state={"scheduler": run.scheduler, "loader": None})
    kept = bool((torch.get_rng_state() == before).all())
    return str(refused.value), run.optimizer.param_groups[0]["lr"], run.scheduler.last_epoch, kept


def _save_on_four(rank: int, size: int, folder: Path) -> float:
    run = Run(LAYOUTS[0])
    run.train(3)
    run.save(folder)
    return run.optimizer.param_groups[0]["lr"]


def test_another_layout_reads_what_is_the_same_on_all_ranks(ranks4: Ranks, tmp_path: Path) -> None:
    rates = ranks4.run(_save_on_four, tmp_path)
    names = {path.name for path in (tmp_path / "step-00000003").glob("state-*")}
    each = {f"state-{name}-{rank:05d}.pt" for name in ("random", "loader") for rank in range(4)}
    assert names == {"state-scheduler.pt"} | each
    for text, rate, steps, kept in ranks4.run(_other_layout, tmp_path):
        assert (rate, steps, kept) == (rates[0], 3, True)
        assert text.endswith(
            "it has a state['loader'] of each rank of pp 2 × dp 1 × ep 2, this run has pp 1 × dp 4 × ep 1; "
            "allowed: the same layout, or None to leave the state"
        )


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


def _other_names(rank: int, size: int, folder: Path) -> str:
    run = Run({"ep": 2})
    with pytest.raises(ValueError, match=r"^[^\n]*$") as refused:
        run.save(folder, state={"loader": run.loader} if rank else {})
    return str(refused.value)


def test_other_names_on_another_rank(ranks2: Ranks, tmp_path: Path) -> None:
    one, other = ranks2.run(_other_names, tmp_path)
    assert one == other
    assert one.endswith("only one of ranks 0 and 1 has state['loader']; allowed: the same names on all ranks")
