"""Whole models as safetensors, from checkpoints of any layout."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from overlap1f1b import consolidate
from overlap1f1b.checkpoint import load_checkpoint, save_checkpoint
from overlap1f1b.engine import Engine
from overlap1f1b.schedule import build_schedule
from tests.checkpoint.runs import Dense, Slice, Tiny, equal, joined, save_on
from tests.checkpoint.test_tensors import flip
from tests.engines import make
from tests.ranks import Ranks, over


def test_the_whole_model(ranks2: Ranks, tmp_path: Path) -> None:
    saved = joined(ranks2.run(save_on, tmp_path / "run"))
    wanted = {name: saved[name] for name in Tiny().state_dict()}
    assert consolidate(tmp_path / "run", tmp_path / "one") == tmp_path / "one"
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["model.safetensors"]
    found = load_file(tmp_path / "one" / "model.safetensors")
    assert equal(found, wanted)
    Tiny(seed=1).load_state_dict(found)
    dcp_to_torch_save(tmp_path / "run" / "step-00000003", tmp_path / "torch.pt")  # torch's own tool
    read = torch.load(tmp_path / "torch.pt")
    assert all(torch.equal(read[f"model.{name}"], wanted[name]) for name in wanted)
    assert torch.equal(read["optimizer.experts.weight.exp_avg"], saved["experts.weight.exp_avg"])
    consolidate(tmp_path / "run" / "step-00000003", tmp_path / "several", file_bytes=100)
    index = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())
    several: dict[str, torch.Tensor] = {}
    for name in sorted(set(index["weight_map"].values())):
        part = load_file(tmp_path / "several" / name)
        assert all(index["weight_map"][key] == name for key in part)
        several |= part
    assert len(set(index["weight_map"].values())) > 1
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in wanted.values())
    assert equal(several, wanted)


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^checkpoint=3; allowed: str or PathLike$"):
        consolidate(3, tmp_path / "out")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^folder=None; allowed: str or PathLike$"):
        consolidate(tmp_path, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^file_bytes=0; allowed: 1 or more$"):
        consolidate(tmp_path, tmp_path / "out", file_bytes=0)
    with pytest.raises(ValueError, match="has no checkpoint; allowed: a folder of save_checkpoint"):
        consolidate(tmp_path, tmp_path / "out")
    path = Tiny().save(tmp_path, 1)
    consolidate(path, tmp_path / "out")
    text = re.escape(f"{tmp_path / 'out'} has model.safetensors; allowed: a folder without such files")
    with pytest.raises(ValueError, match=text):
        consolidate(path, tmp_path / "out")
    flip(path / "__0_0.distcp")
    with pytest.raises(ValueError, match=r"is damaged: \S+ in __0_0\.distcp cannot be read"):
        consolidate(path, tmp_path / "other")
    assert not (tmp_path / "other").exists()
    path = Tiny().save(tmp_path / "bare", 1, model="none")
    with pytest.raises(ValueError, match="has no model, it was saved with model='none'; allowed: one with all or"):
        consolidate(path, tmp_path / "other")
    with pytest.raises(ValueError, match="does not exist"):
        consolidate(tmp_path / "step-00000009", tmp_path / "other")


class Around(nn.Module):
    """A block around a module."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside


class Again(nn.Sequential):
    """Blocks in two places, and modules and parameters that blocks share."""

    def __init__(self, group: Any = None, seed: int = 0) -> None:
        source = torch.Generator().manual_seed(seed)
        dense, experts, head = Dense(3, source), Slice(group, source), nn.Linear(3, 3, bias=False)
        head.weight = dense.weight
        super().__init__(dense, experts, dense, experts, Around(experts), Around(dense), head)
        self.optimizer = torch.optim.AdamW(self.parameters())

    def engine(self, mesh: DeviceMesh | None, *, stages: int = 1) -> Engine:
        program = build_schedule("1f1b", ranks=stages, microbatches=stages)
        weights = None if stages == 1 else [0.0] * 7 + [1.0]
        return make(self, program, mesh=mesh, loss_fn=torch.mean, timeout=30, block_weights=weights)


def again_on(rank: int, size: int, folder: Path) -> bool:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    saved, loaded = Again(mesh.get_group("ep")), Again(mesh.get_group("ep"), seed=1)
    save_checkpoint(saved.engine(mesh), folder, 1, saved.optimizer)
    load_checkpoint(loaded.engine(mesh), folder, loaded.optimizer)
    return equal(saved.state_dict(), loaded.state_dict())


def test_a_module_in_two_places_has_both_names(ranks2: Ranks, tmp_path: Path) -> None:
    assert ranks2.run(again_on, tmp_path / "run") == [True, True]
    wanted = Again().state_dict()
    assert equal(load_file(consolidate(tmp_path / "run", tmp_path / "out") / "model.safetensors"), wanted)
    one = Again(seed=1)
    load_checkpoint(one.engine(None), tmp_path / "run", one.optimizer)
    assert equal(one.state_dict(), wanted)


@over(2)
def test_over_stages(rank: int, size: int, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("pp",))
    model = Again()
    model.append(nn.Linear(3, 3))
    engine = model.engine(mesh, stages=size)
    optimizer = torch.optim.AdamW(engine.parameters())
    save_checkpoint(engine, tmp_path / "run", 1, optimizer)
    load_checkpoint(engine, tmp_path / "run", optimizer)
    found = load_file(consolidate(tmp_path / "run", tmp_path / f"out{rank}") / "model.safetensors")
    assert found.keys() == model.state_dict().keys()


def test_frozen_parameters_of_a_second_place_are_not_trained(tmp_path: Path) -> None:
    model = Again()
    save_checkpoint(model.engine(None), tmp_path / "run", 1, model.optimizer, model="trained")
    found = load_file(consolidate(tmp_path / "run", tmp_path / "out") / "model.safetensors")
    assert found.keys() == {name for name in model.state_dict() if not name.endswith("frozen")}


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    path, file = Tiny().save(tmp_path, 1), tmp_path / "file"
    file.touch()
    with pytest.raises(ValueError, match=f"^{file}: File exists; allowed: a folder that can be written$"):
        consolidate(path, file)
    with pytest.raises(OSError, match=r"/proc/x: No such file or directory; allowed: a folder that can be written$"):
        Tiny().save(Path("/proc/x"), 1)
