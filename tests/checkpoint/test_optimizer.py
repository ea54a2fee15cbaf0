"""Numbers of an optimizer's groups: into a checkpoint and back."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from overlap1f1b.checkpoint import load_checkpoint, save_checkpoint
from overlap1f1b.engine import Engine
from overlap1f1b.schedule import build_schedule

KEPT: dict[str, Any] = {
    "one": None, "flag": True, "large": 2**70, "tiny": 1e-300, "over": -math.inf, "text": "adam", "none": (),
    "nested": [1, (2, [None])], "seen": {3, 4}, "size": np.float64(0.5), "count": np.int64(3),
}  # fmt: skip
TENSORS = {"wide": torch.tensor(1e300, dtype=torch.float64), "on": torch.tensor(True), "number": torch.tensor(3)}
LEFT: dict[str, Any] = {"call": len, "calls": [len], "of": {"a": 1}, "many": torch.ones(2), "other": object(), "z": 1j}


def test_numbers_come_back_as_they_were_and_how_a_step_is_computed_does_not(tmp_path: Path) -> None:
    model, rate = nn.Linear(2, 2), torch.tensor(0.5)
    engine = Engine(nn.Sequential(model), build_schedule("sequential", microbatches=2))
    weight, bias = ({"params": [p]} for p in (model.weight, model.bias))
    given = {**weight, "lr": 0.25, "nan": math.nan, **KEPT, **TENSORS, **LEFT}
    saved = torch.optim.AdamW([given, bias], foreach=True, maximize=True, betas=(0.5, 0.25), amsgrad=True)
    saved.param_groups[1]["lr"] = torch.tensor(0.125)
    save_checkpoint(engine, tmp_path, 1, saved)
    optimizer = torch.optim.AdamW([{**weight, "lr": rate}, {**bias, "lr": 0.5}], fused=True)
    load_checkpoint(engine, tmp_path, optimizer)
    first, second = optimizer.param_groups
    assert first["lr"] is rate  # the same tensor, which a captured graph may read
    assert [float(rate), second["lr"], type(second["lr"])] == [0.25, 0.125, float]
    assert {name: first[name] for name in KEPT} == KEPT
    assert [type(first[name]) for name in KEPT] == [
        type(None),
        bool,
        int,
        float,
        float,
        str,
        tuple,
        list,
        set,
        float,
        int,
    ]
    assert all(torch.equal(first[name], one) and first[name].dtype == one.dtype for name, one in TENSORS.items())
    assert math.isnan(first["nan"])
    assert not LEFT.keys() & first.keys()
    assert (first["foreach"], first["fused"]) == (None, True)
    assert (first["maximize"], first["betas"], first["amsgrad"]) == (True, (0.5, 0.25), True)
