"""Training checkpoints: written whole or not at all, and readable by another number of expert-parallel ranks.

    save(Path("runs/x"), 100, model, optimizer, config={"hidden": 128}, mesh=mesh, sharded=names)
    step = load(latest(Path("runs/x")), model, optimizer, config={"hidden": 128}, mesh=mesh, sharded=names)

A checkpoint is what torch.distributed.checkpoint (DCP) writes, in a folder that checkpoint_folder.py publishes when
every rank is done.

A parameter named in `sharded` is an equal slice of dimension 0 on each rank along "ep" of `mesh`, rank 0 first: it goes
to DCP as a DTensor of the full shape, with its optimizer state of the same shape. Everything else is equal on all ranks
that hold it and stored once. Pipeline ranks store the blocks that they train, under the names of the whole model. DCP
keeps its index as a pickle: load only checkpoints of people you trust.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
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

from overlap1f1b.engine.checkpoint_folder import abandon, begin, damaged, name_of, other, publish, verify

T = TypeVar("T")


def save(
    directory: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    config: Mapping[str, Any],
    mesh: DeviceMesh | None,
    sharded: Collection[str] = (),
    blocks: Collection[str] | None = None,
    tied: Mapping[str, str] = MappingProxyType({}),
    keep: int = 2,
) -> Path:
    """Write `directory`/step-00000100 and remove all but the newest `keep` checkpoints. Collective over all ranks.

    config: JSON values; what a run must have in common with this one to resume from it (sizes, text), and no more.
    mesh: of all ranks, which see one file system; None: this process alone.
    blocks: names of the model's children that this rank stores; None: all.
    tied: one name for parameters that are copies of one, by their own names; the optimizer's state is stored under it.
    Stored are the model's state dict and the tensors of the optimizer's state, not its hyperparameters.

    Raises ValueError where `keep` is below 1 or `sharded` names no parameter of the model; OSError, on every rank,
    where a rank cannot write.
    """
    if keep < 1:
        raise ValueError(f"keep={keep} would remove the checkpoint just written; use keep=1 or more")
    tensors = _model_tensors(model, mesh, sharded, blocks) | _optimizer_tensors(
        model, optimizer, mesh, sharded, blocks, tied
    )
    unfinished = on_first_rank(mesh, lambda: begin(directory, step))
    try:
        with _quiet():
            state_dict_saver.save(tensors, storage_writer=FileSystemWriter(unfinished), **_group(mesh))
    except CheckpointException as error:
        free = on_first_rank(mesh, lambda: abandon(unfinished))
        why = f"{_cause(error)} ({free / 2**20:.0f} MiB are free)"
        raise OSError(f"checkpoint {directory / name_of(step)} cannot be written: {why}") from None
    return on_first_rank(mesh, lambda: publish(unfinished, step, config=config, keep=keep))


def load(
    checkpoint: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    config: Mapping[str, Any],
    mesh: DeviceMesh | None,
    sharded: Collection[str] = (),
    blocks: Collection[str] | None = None,
    tied: Mapping[str, str] = MappingProxyType({}),
    partial: bool = False,
) -> int:
    """Fill `model` and `optimizer` in place and return the step. Collective over all ranks, of any number.

    The optimizer may be fresh: its state is made from what the checkpoint holds. Its hyperparameters stay as they are.

    partial: whether other ranks may hold parameters whose names say nothing about it.

    Raises ValueError, on every rank: where the checkpoint has another configuration than this run, or a tensor of
    another name, shape or dtype (the first difference, with both values); where a file of it is missing or damaged.
    """
    step = on_first_rank(mesh, lambda: verify(checkpoint, config))
    stored = _index(checkpoint)
    parameters = _optimized(model, optimizer)
    copies: dict[str, list[str]] = {}
    for name in parameters:
        copies.setdefault(tied.get(name, name), []).append(name)
    state: dict[str, dict[str, Tensor]] = {name: {} for name in parameters}
    tensors = _model_tensors(model, mesh, sharded, blocks)
    elsewhere = {name for name, _ in model.named_children() if blocks is not None and name not in blocks}
    for key, meta in stored.items():
        kind, _, path = key.partition(".")
        name, _, entry = path.rpartition(".")
        if kind == "optimizer" and name in copies:
            name = copies[name][0]
            parameter = parameters[name]
            like_parameter = meta.size == _whole(parameter, name, mesh, sharded).shape
            state[name][entry] = torch.empty(
                parameter.shape if like_parameter else meta.size,
                dtype=meta.properties.dtype,
                device=parameter.device if like_parameter else "cpu",
            )
            tensors[key] = _whole(state[name][entry], name, mesh, sharded) if like_parameter else state[name][entry]
    for key in tensors | stored:
        if key.split(".")[1] in elsewhere or (partial and key not in tensors):
            continue
        here = f"{tensors[key].dtype}{list(tensors[key].shape)}" if key in tensors else "none"
        there = f"{stored[key].properties.dtype}{list(stored[key].size)}" if key in stored else "none"
        if here != there:
            raise other(checkpoint, key, there, here)
    without = [names[0] for names in copies.values() if not state[names[0]]] if any(state.values()) else []
    if without:  # tied to another parameter where it was written, not here
        raise other(checkpoint, f"optimizer.{without[0]}", "none", "a state")
    try:
        with _quiet():
            state_dict_loader.load(tensors, storage_reader=FileSystemReader(checkpoint), **_group(mesh))
    except CheckpointException as error:
        raise damaged(checkpoint, _cause(error)) from None
    for first, *others in copies.values():
        for name in others:
            state[name] = {entry: value.clone() for entry, value in state[first].items()}
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": dict(enumerate(state.values())), "param_groups": groups})
    return step


def _index(checkpoint: Path) -> dict[str, TensorStorageMetadata]:
    """Shapes and dtypes of the stored tensors. The index is a pickle of torch's own classes, which change."""
    try:
        metadata = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    except Exception as error:  # unpickling raises whatever the classes do
        why = f"torch {torch.__version__} cannot read its index ({type(error).__name__})"
        raise damaged(checkpoint, why) from None
    return {key: meta for key, meta in metadata.items() if isinstance(meta, TensorStorageMetadata)}


# What is stored: "model.<name>" and "optimizer.<parameter>.<entry>", tensors of their full shapes.


def _model_tensors(
    model: nn.Module, mesh: DeviceMesh | None, sharded: Collection[str], blocks: Collection[str] | None
) -> dict[str, Tensor]:
    state = model.state_dict()
    for name in sharded:
        if name not in state:
            raise ValueError(f"sharded names {name}, which the model has no parameter of; it has {', '.join(state)}")
    held = {name: t for name, t in state.items() if blocks is None or name.split(".")[0] in blocks}
    return {f"model.{name}": _whole(tensor, name, mesh, sharded) for name, tensor in held.items()}


def _optimizer_tensors(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    mesh: DeviceMesh | None,
    sharded: Collection[str],
    blocks: Collection[str] | None,
    tied: Mapping[str, str],
) -> dict[str, Tensor]:
    """The state's tensors; of those, the ones shaped like their parameter are sharded like it."""
    parameters = _optimized(model, optimizer)
    held = {name: p for name, p in parameters.items() if blocks is None or name.split(".")[0] in blocks}
    begun = next((p for p in held.values() if optimizer.state.get(p)), None)
    tensors = {}
    for name, parameter in held.items():
        state = optimizer.state.get(parameter)
        if not state and begun is not None:
            # Never updated here, such as experts that no token met; another rank's part may have been.
            state = {
                entry: torch.zeros_like(parameter if value.shape == begun.shape else value)
                for entry, value in optimizer.state[begun].items()
                if isinstance(value, Tensor)
            }
        for entry, value in (state or {}).items():
            if isinstance(value, Tensor):
                alike = value.shape == parameter.shape
                key = f"optimizer.{tied.get(name, name)}.{entry}"
                tensors[key] = _whole(value, name, mesh, sharded) if alike else value
    return tensors


def _optimized(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """The parameters that the optimizer updates, by name, in the optimizer's order."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[parameter]: parameter for group in optimizer.param_groups for parameter in group["params"]}


def _whole(tensor: Tensor, name: str, mesh: DeviceMesh | None, sharded: Collection[str]) -> Tensor:
    """`tensor`, or the tensor that it is this rank's slice of. Both share its memory."""
    if mesh is None or name not in sharded:
        return tensor.detach()
    ep = mesh["ep"] if "ep" in (mesh.mesh_dim_names or ()) else mesh
    return DTensor.from_local(tensor.detach(), ep, [Shard(0)], run_check=False)


# What the ranks do together.


def _cause(error: CheckpointException) -> str:
    """The first rank's failure in one line."""
    rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
    return f"rank {rank}: {type(cause).__name__}: {cause}".splitlines()[0]


def on_first_rank(mesh: DeviceMesh | None, work: Callable[[], T]) -> T:
    """What `work` gives on the first rank, or raises there, on all of them."""
    if mesh is None:
        return work()
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = work()
        except (OSError, ValueError) as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def _group(mesh: DeviceMesh | None) -> dict[str, Any]:
    return {"no_dist": True} if mesh is None else {}


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warning that DCP gives for the documented `no_dist=True`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
