"""States of a run in another layout, and states that do not fit. For the same layout see test_save_background.py."""

import re
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from tests.checkpoint.runs import Run
from tests.ranks import over


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
