"""A whole training run: schedules, dataloaders and random numbers go on to the bit; states that do not fit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from tests.checkpoint.runs import Run, equal
from tests.ranks import Ranks, over
from tests.tiers import wide


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
    index = FileSystemReader(tmp_path / "step-00000003").read_metadata().state_dict_metadata
    each = {f"state.{name}.{rank:05d}" for name in ("random", "loader") for rank in range(2)}
    assert {name for name in index if name.startswith("state.")} == {"state.scheduler"} | each
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
    text = r": state is random on rank ep 0 and loader, random on rank ep 1; allowed: the same on all ranks$"
    with pytest.raises(ValueError, match=text):
        run.save(tmp_path, state={"loader": run.loader} if rank else {})
