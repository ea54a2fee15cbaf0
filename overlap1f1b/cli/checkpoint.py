"""Training checkpoints: written whole or not at all, and readable by another number of expert-parallel ranks.

    save(Path("runs/x"), 100, model, optimizer, config={"hidden": 128}, mesh=mesh, sharded=names)
    step = load(latest(Path("runs/x")), model, optimizer, config={"hidden": 128}, mesh=mesh, sharded=names)

A checkpoint is a folder `step-00000100` that torch.distributed.checkpoint (DCP) wrote, with a `config.json` that holds
the step, the configuration, and the size and CRC-32 of every other file. It is written into a hidden sibling and
renamed when every rank is done and the bytes are on the disk, so a kill at any moment leaves the previous one; what a
kill leaves behind is hidden, is ignored, and is removed by the next `save`.

A parameter named in `sharded` is an equal slice of dimension 0 on each rank of `mesh` (1-D), rank 0 first: it goes to
DCP as a DTensor of the full shape, with its optimizer state of the same shape. Everything else is equal on all ranks
and stored once. DCP keeps its index as a pickle: load only checkpoints of people you trust.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

T = TypeVar("T")

CONFIG = "config.json"
NAME = re.compile(r"(\.replaced-)?step-(\d{8,})")


def save(
    directory: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    config: Mapping[str, Any],
    mesh: DeviceMesh | None,
    sharded: Collection[str] = (),
    keep: int = 2,
) -> Path:
    """Write `directory`/step-00000100 and remove all but the newest `keep` checkpoints. Collective over `mesh`.

    config: JSON values; what a run must have in common with this one to resume from it (sizes, text), and no more.
    mesh: the 1-D mesh of the ranks that train together, which see one file system; None: this process alone.
    Stored are the model's state dict and the tensors of the optimizer's state, not its hyperparameters.

    Raises ValueError where `keep` is below 1 or `sharded` names no parameter of the model; OSError, on every rank,
    where a rank cannot write.
    """
    if keep < 1:
        raise ValueError(f"keep={keep} would remove the checkpoint just written; use keep=1 or more")
    final = directory / f"step-{step:08d}"
    unfinished = directory / f".{final.name}.unfinished"

    def prepare() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        for leftover in directory.glob(".step-*.unfinished"):
            shutil.rmtree(leftover)
        for replaced in directory.glob(".replaced-step-*"):
            if (directory / replaced.name.removeprefix(".replaced-")).exists():
                _discard(replaced)
        unfinished.mkdir()

    def publish() -> None:
        files = {path.name: _fingerprint(path) for path in sorted(unfinished.iterdir())}
        with (unfinished / CONFIG).open("w") as file:
            json.dump({"step": step, "config": dict(config), "files": files}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _sync(unfinished)
        replaced = directory / f".replaced-{final.name}"
        if final.exists():  # the same step once more
            final.rename(replaced)
        unfinished.rename(final)
        _sync(directory)
        if replaced.exists():
            _discard(replaced)
        others = [path for path in _checkpoints(directory) if path != final]
        for path in others[: max(len(others) - keep + 1, 0)]:
            _discard(path)

    tensors = _model_tensors(model, mesh, sharded) | _optimizer_tensors(model, optimizer, mesh, sharded)
    _on_first_rank(mesh, prepare)
    try:
        with _quiet():
            state_dict_saver.save(tensors, storage_writer=FileSystemWriter(unfinished), **_group(mesh))
    except CheckpointException as error:
        raise OSError(f"checkpoint {final} cannot be written: {_cause(error)}") from None
    _on_first_rank(mesh, publish)
    return final


def latest(directory: Path) -> Path | None:
    """The checkpoint of the highest step in `directory`, or None where there is none."""
    found = _checkpoints(directory)
    return found[-1] if found else None


def load(
    checkpoint: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    config: Mapping[str, Any],
    mesh: DeviceMesh | None,
    sharded: Collection[str] = (),
) -> int:
    """Fill `model` and `optimizer` in place and return the step. Collective over `mesh`, of any size.

    The optimizer may be fresh: its state is made from what the checkpoint holds. Its hyperparameters stay as they are.

    Raises ValueError, on every rank: where the checkpoint has another configuration than this run, or a tensor of
    another name, shape or dtype (the first difference, with both values); where a file of it is missing or damaged.
    """
    step = _on_first_rank(mesh, lambda: _verify(checkpoint, config))
    metadata = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    stored = {key: meta for key, meta in metadata.items() if isinstance(meta, TensorStorageMetadata)}
    parameters = _optimized(model, optimizer)
    state: dict[str, dict[str, Tensor]] = {name: {} for name in parameters}
    tensors = _model_tensors(model, mesh, sharded)
    for key, meta in stored.items():
        kind, _, path = key.partition(".")
        name, _, entry = path.rpartition(".")
        if kind == "optimizer" and name in parameters:
            parameter = parameters[name]
            like_parameter = meta.size == _whole(parameter, name, mesh, sharded).shape
            state[name][entry] = torch.empty(
                parameter.shape if like_parameter else meta.size,
                dtype=meta.properties.dtype,
                device=parameter.device if like_parameter else "cpu",
            )
            tensors[key] = _whole(state[name][entry], name, mesh, sharded) if like_parameter else state[name][entry]
    for key in tensors | stored:
        here = f"{tensors[key].dtype}{list(tensors[key].shape)}" if key in tensors else "none"
        there = f"{stored[key].properties.dtype}{list(stored[key].size)}" if key in stored else "none"
        if here != there:
            raise _other(checkpoint, key, there, here)
    try:
        with _quiet():
            state_dict_loader.load(tensors, storage_reader=FileSystemReader(checkpoint), **_group(mesh))
    except CheckpointException as error:
        raise _damaged(checkpoint, _cause(error)) from None
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": dict(enumerate(state.values())), "param_groups": groups})
    return step


# What is stored: "model.<name>" and "optimizer.<parameter>.<entry>", tensors of their full shapes.


def _model_tensors(model: nn.Module, mesh: DeviceMesh | None, sharded: Collection[str]) -> dict[str, Tensor]:
    state = model.state_dict()
    for name in sharded:
        if name not in state:
            raise ValueError(f"sharded names {name}, which the model has no parameter of; it has {', '.join(state)}")
    return {f"model.{name}": _whole(tensor, name, mesh, sharded) for name, tensor in state.items()}


def _optimizer_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh | None, sharded: Collection[str]
) -> dict[str, Tensor]:
    """The state's tensors; of those, the ones shaped like their parameter are sharded like it."""
    return {
        f"optimizer.{name}.{entry}": _whole(value, name, mesh, sharded) if value.shape == parameter.shape else value
        for name, parameter in _optimized(model, optimizer).items()
        for entry, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def _optimized(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """The parameters that the optimizer updates, by name, in the optimizer's order."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[parameter]: parameter for group in optimizer.param_groups for parameter in group["params"]}


def _whole(tensor: Tensor, name: str, mesh: DeviceMesh | None, sharded: Collection[str]) -> Tensor:
    """`tensor`, or the tensor that it is this rank's slice of. Both share its memory."""
    if mesh is None or name not in sharded:
        return tensor.detach()
    return DTensor.from_local(tensor.detach(), mesh, [Shard(0)], run_check=False)


# Where it is stored.


def _checkpoints(directory: Path) -> list[Path]:
    """The checkpoints in `directory`, lowest step first. One that is being replaced comes before its replacement."""
    found = [(match, path) for path in directory.glob("*") if (match := NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, key=lambda pair: (int(pair[0][2]), pair[0][1] is None))]


def _discard(checkpoint: Path) -> None:
    """Remove a checkpoint, at no moment leaving half of one under its name."""
    name = checkpoint.name.removeprefix(".replaced-")
    shutil.rmtree(checkpoint.rename(checkpoint.parent / f".{name}.unfinished"))


def _verify(checkpoint: Path, config: Mapping[str, Any]) -> int:
    """The step of a checkpoint that is whole and of this `config`; otherwise ValueError."""
    if not checkpoint.is_dir():
        raise ValueError(f"checkpoint {checkpoint} does not exist")
    try:
        written = json.loads((checkpoint / CONFIG).read_text())
        step, there, files = int(written["step"]), dict(written["config"]), dict(written["files"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _damaged(checkpoint, f"{CONFIG} cannot be read ({type(error).__name__})") from None
    here = json.loads(json.dumps(dict(config)))
    for key in here | there:
        if key not in here or key not in there or here[key] != there[key]:
            raise _other(checkpoint, key, *(str(one[key]) if key in one else "none" for one in (there, here)))
    for name, expected in files.items():
        try:
            actual = _fingerprint(checkpoint / name)
        except OSError as error:
            raise _damaged(checkpoint, f"{name} cannot be read ({error.strerror})") from None
        if actual != expected:
            what = (
                "has other bytes than were"
                if actual["bytes"] == expected["bytes"]
                else (f"has {actual['bytes']} bytes, not the {expected['bytes']}")
            )
            raise _damaged(checkpoint, f"{name} {what} written")
    return step


def _fingerprint(path: Path) -> dict[str, int]:
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(2**20):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return {"bytes": size, "crc32": crc}


def _sync(folder: Path) -> None:
    """Bring the names in `folder` to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# How it is said and shared.


def _other(checkpoint: Path, key: str, there: str, here: str) -> ValueError:
    return ValueError(
        f"checkpoint {checkpoint} has {key}={there}, this run has {key}={here}; "
        "use the same settings or another --checkpoint folder"
    )


def _damaged(checkpoint: Path, why: str) -> ValueError:
    return ValueError(
        f"checkpoint {checkpoint} is damaged: {why}; remove it to resume from an earlier one, "
        "or use another --checkpoint folder"
    )


def _cause(error: CheckpointException) -> str:
    """The first rank's failure in one line."""
    rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
    return f"rank {rank}: {type(cause).__name__}: {cause}".splitlines()[0]


def _on_first_rank(mesh: DeviceMesh | None, work: Callable[[], T]) -> T:
    """What `work` gives on the first rank of `mesh`, or raises there, on all of them."""
    if mesh is None:
        return work()
    outcome: list[Any] = [None, None]
    if mesh.get_local_rank() == 0:
        try:
            outcome[0] = work()
        except (OSError, ValueError) as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, group=mesh.get_group(), group_src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def _group(mesh: DeviceMesh | None) -> dict[str, Any]:
    return {"no_dist": True} if mesh is None else {"process_group": mesh.get_group()}


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warning that DCP gives for the documented `no_dist=True`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
