"""Whole models as safetensors, from checkpoints of any layout."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from overlap1f1b import consolidate
from tests.engine.checkpoint.test_save import Tiny, flip, joined, save_on
from tests.ranks import Ranks


def test_the_whole_model(ranks2: Ranks, tmp_path: Path) -> None:
    saved = joined(ranks2.run(save_on, tmp_path / "run"))
    wanted = {name: saved[name] for name in Tiny().state_dict()}
    assert consolidate(tmp_path / "run", tmp_path / "one") == tmp_path / "one"
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["model.safetensors"]
    found = load_file(tmp_path / "one" / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    model = Tiny(seed=1)
    model.load_state_dict(found)
    consolidate(tmp_path / "run" / "step-00000003", tmp_path / "several", file_bytes=100)
    index = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())
    several: dict[str, torch.Tensor] = {}
    for name in sorted(set(index["weight_map"].values())):
        part = load_file(tmp_path / "several" / name)
        assert all(index["weight_map"][key] == name for key in part)
        several |= part
    assert len(set(index["weight_map"].values())) > 1
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in wanted.values())
    assert all(torch.equal(several[name], wanted[name]) for name in wanted)


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no checkpoint; allowed: a folder of save_checkpoint"):
        consolidate(tmp_path, tmp_path / "out")
    path = Tiny().save(tmp_path, 1)
    consolidate(path, tmp_path / "out")
    text = re.escape(f"{tmp_path / 'out'} has model.safetensors; allowed: a folder without such files")
    with pytest.raises(ValueError, match=text):
        consolidate(path, tmp_path / "out")
    flip(path / "__0_0.distcp")
    with pytest.raises(ValueError, match=r"is damaged: __0_0\.distcp has other bytes than were written"):
        consolidate(path, tmp_path / "other")
    assert not (tmp_path / "other").exists()
    path = Tiny().save(tmp_path / "bare", 1, model="none")
    with pytest.raises(ValueError, match="has no model, it was saved with model='none'; allowed: one with all or"):
        consolidate(path, tmp_path / "other")
    with pytest.raises(ValueError, match="does not exist"):
        consolidate(tmp_path / "step-00000009", tmp_path / "other")
