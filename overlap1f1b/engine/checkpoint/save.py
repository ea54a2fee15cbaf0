"""Training checkpoints: written whole or not at all, and readable by another number of expert-parallel ranks.

    held = lambda: Held(model, optimizer, mesh, sharded=names)
    save(Path("runs/x"), 100, mesh, held, config={"hidden": 128})
    step = load(latest(Path("runs/x")), mesh, held, config={"hidden": 128})

A checkpoint is what torch.distributed.checkpoint (DCP) writes, in a folder that checkpoint_folder.py publishes when
every rank is done. The ranks exchange DCP's plans over the engine's mesh, not over torch's default group: so no wait is
longer than the engine's limit, and what fails on one rank is raised on all.

A parameter named in `sharded` is an equal slice of dimension 0 on each rank along "ep" of `mesh`, rank 0 first: it goes
to DCP as a DTensor of the full shape, with its optimizer state of as many rows. Everything else is equal on all ranks
that hold it and stored once. Pipeline ranks store the blocks that they train, under the names of the whole model.

A parameter that was never updated has no optimizer state, and none is stored: its optimizer begins where it resumes. Of
a sharded one, slices without a state are stored as zeros where another slice has one, as of rows with no gradient.

DCP keeps its index as a pickle: load only checkpoints of people you trust.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor, Shard

from overlap1f1b.engine.checkpoint import hyperparameters
from overlap1f1b.engine.checkpoint.folder import (
    MOST_STEPS,
    Contents,
    Fingerprint,
    abandon,
    begin,
    check,
    damaged,
    fingerprints,
    name_of,
    other,
    publish,
    read,
)
from overlap1f1b.engine.checkpoint.hyperparameters import Stored
from overlap1f1b.schedule.quoting import cut, quoted
from overlap1f1b.transport.failures import headline
from overlap1f1b.transport.mesh import Mesh
from overlap1f1b.transport.together import Together

_INDEX = ".metadata"

State = dict[str, Any]
Json = Any


class Held(NamedTuple):
    """What a rank has of a model.

    Args:
        model: With the names of the whole model.
        optimizer: Of its parameters.
        mesh: Of all ranks, which see one file system.
        sharded: Names of parameters that ranks along "ep" have slices of.
        blocks: Children that this rank trains; None where the model has these alone.
        tied: One name for parameters that are copies of one; the optimizer's state is stored under it.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    mesh: Mesh
    sharded: Collection[str] = ()
    blocks: Collection[str] | None = None
    tied: Mapping[str, str] = MappingProxyType({})

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Those that the optimizer updates, by name, in the optimizer's order.

        Raises:
            ValueError: One of them is not the model's.
        """
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        every = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for parameter in every:
            if parameter not in names:
                raise ValueError(
                    f"the optimizer has a parameter of shape {list(parameter.shape)} that this rank's model has not; "
                    "allowed: an optimizer of the engine's parameters"
                )
        return {names[parameter]: parameter for parameter in every}

    @property
    def stored_names(self) -> dict[nn.Parameter, str]:
        """The names under which the optimizer's parameters are stored."""
        return {parameter: self.tied.get(name, name) for name, parameter in self.parameters.items()}

    def holds(self, name: str) -> bool:
        """Whether this rank stores a parameter."""
        return self.blocks is None or name.partition(".")[0] in self.blocks

    def whole(self, tensor: Tensor, name: str) -> Tensor:
        """`tensor`, or the tensor that it is this rank's slice of. Both share its memory."""
        devices = self.mesh.devices
        if devices is None or not self.slices(name):
            return tensor.detach()
        return DTensor.from_local(tensor.detach(), devices["ep"], [Shard(0)], run_check=False)

    def slices(self, name: str) -> bool:
        """Whether this rank has a slice of a parameter alone."""
        return name in self.sharded and self.mesh.size("ep") > 1

    def has_rows(self, name: str, parameter: Tensor, entry: str, value: Tensor) -> bool:
        """Whether a tensor of the optimizer's state is sliced as its parameter is.

        Raises:
            ValueError: It has neither a row for each row of the parameter nor a single number.
        """
        rows = value.shape == parameter.shape or (value.numel() > 1 and value.shape[:1] == parameter.shape[:1])
        if self.slices(name) and value.numel() > 1 and not rows:
            raise ValueError(
                f"the optimizer's {entry} of {name} has shape {list(value.shape)}; allowed for a slice along 'ep' of "
                f"shape {list(parameter.shape)}: {parameter.shape[0]} rows, or a single number"
            )
        return self.slices(name) and rows

    def tensors(self) -> dict[str, Tensor]:
        """The model's, as they are stored.

        Raises:
            ValueError: `sharded` names no parameter of the model.
        """
        state = self.model.state_dict()
        for name in self.sharded:
            if name not in state:
                raise ValueError(
                    f"sharded names {name}, which the model has no parameter of; it has {', '.join(state)}"
                )
        return {f"model.{name}": self.whole(tensor, name) for name, tensor in state.items() if self.holds(name)}


def save(
    directory: Path,
    step: int,
    mesh: Mesh,
    held_of: Callable[[], Held],
    *,
    config: Mapping[str, Any],
    keep: int = 2,
) -> Path:
    """Write `directory`/step-00000100 and remove all but the newest `keep` checkpoints. Collective over all ranks.

    held_of: gives what this rank has; asked for where a failure is told to the other ranks.
    config: JSON values; what a run must have in common with this one to resume from it (sizes, text), and no more.
    Stored are the model's state dict, the optimizer's state, and the numbers of its parameter groups.

    Raises, on every rank, what :class:`Together` does: ValueError where `keep` is below 1, `step` is none, `config` is
    no JSON, or `sharded` names no parameter of the model; OSError where a rank cannot write.
    """
    name = name_of(step) if type(step) is int else f"step {quoted(step)}"
    together = Together(mesh, f"checkpoint {directory / name} cannot be written")

    mine: list[tuple[Held, dict[str, Tensor]]] = []

    def gather() -> tuple[int, list[Any], _State]:
        _check_options(step, config, keep)
        held = held_of()
        mine.append((held, held.tensors()))
        return step, hyperparameters.groups_of(held.optimizer, held.stored_names), _state_of(held, together.rank)

    every = together.each(gather)
    if len({number for number, _, _ in every}) > 1:
        raise ValueError(f"{together.failed}: ranks have steps {sorted({n for n, _, _ in every})}; allowed: one of all")
    held, tensors = mine[0]
    leads = _leads(state for _, _, state in every)
    added = {
        "groups": hyperparameters.described([groups for _, groups, _ in every]),
        "state": _numbers([state for _, _, state in every], leads),
    }
    unfinished = together.first(lambda: begin(directory, step))
    planner, writer = DefaultSavePlanner(), FileSystemWriter(unfinished)

    def planned() -> SavePlan:
        stored = tensors | _state_tensors(held, together.rank, leads)
        planner.set_up_planner(stored, storage_meta=writer.storage_meta(), is_coordinator=together.rank == 0)
        writer.set_up_storage_writer(together.rank == 0, rank=together.rank, use_collectives=True)
        return writer.prepare_local_plan(planner.create_local_plan())

    plans = together.each(planned)
    index: list[Metadata] = []

    def merged() -> list[SavePlan]:
        every, metadata = planner.create_global_plan(plans)
        index.append(metadata)
        return writer.prepare_global_plan(every)

    final = together.first(merged)[together.rank]

    def write() -> tuple[list[WriteResult], dict[str, Fingerprint]]:
        results = writer.write_data(planner.finish_plan(final), planner)
        results.wait()
        names = [path.name for path in unfinished.glob(f"__{together.rank}_*")]
        return results.value(), fingerprints(unfinished, names)

    try:
        written = together.each(write, OSError)
    except OSError as error:
        free = together.first(lambda: abandon(unfinished))
        raise OSError(f"{error} ({free / 2**20:.0f} MiB are free)") from error.__cause__
    files = {name: fingerprint for _, known in written for name, fingerprint in known.items()}

    def finish() -> Path:
        writer.finish(index[0], [results for results, _ in written])
        return publish(unfinished, step, config=config, keep=keep, files=files, added=added)

    return together.first(finish)


def load(
    checkpoint: Path,
    mesh: Mesh,
    held_of: Callable[[], Held],
    *,
    config: Mapping[str, Any],
    partial: bool = False,
) -> int:
    """Fill a model and its optimizer in place and return the step. Collective over all ranks, of any number.

    The optimizer may be fresh: its state and the numbers of its parameter groups are made from what the checkpoint
    holds. One that was written without these numbers leaves those of the optimizer.

    partial: whether other ranks may hold parameters whose names say nothing about it.

    Raises, on every rank, what :class:`Together` does: ValueError where the checkpoint has another configuration than
    this run, a tensor of another name, shape or dtype (the first difference, with both values), or other groups of
    parameters; where a file of it is missing or damaged.
    """
    together = Together(mesh, f"checkpoint {checkpoint} cannot be loaded")
    contents = together.first(lambda: read(checkpoint, config))
    names = sorted(contents.files)
    together.each(lambda: check(checkpoint, contents.files, names[together.rank :: together.size]))
    loads: list[_Load] = []

    def prepare() -> int:
        loads.append(_Load(checkpoint, contents, held_of(), partial=partial))
        return len(loads[0].held.optimizer.param_groups)

    counts = together.each(prepare)
    loads[0].check_groups(counts)
    together.each(loads[0].choose)
    together.each(loads[0].fill)
    return contents.step


class _Load:
    """What a rank takes from a checkpoint: first compared, then read."""

    def __init__(self, checkpoint: Path, contents: Contents, held: Held, *, partial: bool) -> None:
        self.checkpoint, self.contents, self.held, self.partial = checkpoint, contents, held, partial
        self.tensors = held.tensors()
        self.parameters = held.parameters
        self.copies: dict[str, list[str]] = {}
        for name in self.parameters:
            self.copies.setdefault(held.tied.get(name, name), []).append(name)
        self.state: dict[str, State] = {name: {} for name in self.parameters}
        added = contents.added
        self.groups: Stored | None = None
        self.chosen: list[dict[str, Any] | None] | None = None
        numbers: dict[str, dict[str, Json]] = {}
        if added is not None:
            try:
                self.groups, numbers = Stored.read(added["groups"]), dict(added["state"])
            except (KeyError, TypeError, ValueError) as error:
                raise self._unreadable(error) from None
        stored = self._index()
        self._add_state(stored, numbers)
        self._compare(stored)

    def check_groups(self, counts: list[int]) -> None:
        """Refuses another number of groups than was saved; the same on all ranks.

        Raises:
            ValueError: It is another.
        """
        if self.groups is not None:
            with self._named():
                self.groups.check_count(counts)

    def choose(self) -> None:
        """Finds the numbers of this rank's groups.

        Raises:
            ValueError: A group has parameters of several.
        """
        if self.groups is not None:
            with self._named():
                self.chosen = self.groups.chosen(self.held.optimizer, self.held.stored_names)

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise ValueError(f"checkpoint {self.checkpoint}: {error}") from None

    def _index(self) -> dict[str, TensorStorageMetadata]:
        """Shapes and dtypes of the stored tensors. The index is a pickle of torch's own classes, which change."""
        try:
            metadata = FileSystemReader(self.checkpoint).read_metadata()
            kept = {storage.relative_path for storage in metadata.storage_data.values()}
        except Exception as error:  # unpickling raises whatever the classes do
            why = f"torch {torch.__version__} cannot read its index ({type(error).__name__})"
            raise damaged(self.checkpoint, why) from None
        if unlisted := sorted({_INDEX, *kept} - self.contents.files.keys()):
            raise damaged(self.checkpoint, f"its list of files has no {quoted(unlisted[0], plain=True)}")
        every = metadata.state_dict_metadata.items()
        return {key: meta for key, meta in every if isinstance(meta, TensorStorageMetadata)}

    def _add_state(
        self, stored: Mapping[str, TensorStorageMetadata], numbers: Mapping[str, Mapping[str, Json]]
    ) -> None:
        held = self.held
        for key, meta in stored.items():
            kind, _, path = key.partition(".")
            stored_name, _, entry = path.rpartition(".")
            if kind != "optimizer" or stored_name not in self.copies:
                continue
            name = self.copies[stored_name][0]
            parameter = self.parameters[name]
            whole = held.whole(parameter, name).shape
            rows = meta.size == whole or (meta.size.numel() > 1 and held.slices(name))
            if rows and meta.size[:1] != whole[:1]:
                raise other(self.checkpoint, key, f"shape {list(meta.size)}", f"{whole[0]} rows")
            value = torch.empty(
                (*parameter.shape[:1], *meta.size[1:]) if rows else meta.size,
                dtype=meta.properties.dtype,
                device=parameter.device if rows else "cpu",
            )
            self.state[name][entry] = value
            self.tensors[key] = held.whole(value, name) if rows else value
        try:
            for name, *_ in self.copies.values():
                entries = numbers.get(held.tied.get(name, name), {})
                self.state[name] |= {entry: hyperparameters.decoded(value) for entry, value in entries.items()}
        except (ValueError, AttributeError, RuntimeError) as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: Exception) -> ValueError:
        return damaged(self.checkpoint, f"its optimizer cannot be read ({type(error).__name__})")

    def _compare(self, stored: Mapping[str, TensorStorageMetadata]) -> None:
        held, tensors = self.held, self.tensors
        elsewhere = {name for name, _ in held.model.named_children() if not held.holds(name)}
        for key in tensors | dict(stored):
            if key.partition(".")[2].split(".")[0] in elsewhere or (self.partial and key not in tensors):
                continue
            here = f"{tensors[key].dtype}{list(tensors[key].shape)}" if key in tensors else "none"
            there = f"{stored[key].properties.dtype}{list(stored[key].size)}" if key in stored else "none"
            if here != there:
                raise other(self.checkpoint, key, there, here)
        if not any(self.state.values()):
            return
        # One that was optimized has no state where it was never updated; one that was not was tied to another there.
        known = self.groups.of if self.groups is not None else {n for n in self.copies if self.state[self.copies[n][0]]}
        for name, (first, *_) in self.copies.items():
            if name not in known:
                raise other(self.checkpoint, f"optimizer.{first}", "none", "a state")

    def fill(self) -> None:
        """Reads everything.

        Raises:
            ValueError: A file is damaged.
        """
        try:
            with _quiet():
                reader = FileSystemReader(self.checkpoint)
                state_dict_loader.load(self.tensors, storage_reader=reader, no_dist=True)
        except CheckpointException as error:
            (cause, _), *_ = error.failures.values()
            raise damaged(self.checkpoint, headline(cause)) from None
        for first, *others in self.copies.values():
            for name in others:
                self.state[name] = {
                    entry: value.clone() if isinstance(value, Tensor) else value
                    for entry, value in self.state[first].items()
                }
        optimizer = self.held.optimizer
        own = [dict(group) for group in optimizer.param_groups]
        state = {number: state for number, state in enumerate(self.state.values()) if state}
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        for group, before in zip(optimizer.param_groups, own, strict=True):
            group.update({key: value for key, value in before.items() if isinstance(value, Tensor)})  # not its copy
        if self.chosen is not None:
            hyperparameters.set_groups(optimizer, self.chosen)


# The optimizer's state, stored as "optimizer.<parameter>.<entry>", tensors of their full shapes, beside "model.<name>".


class _Slice(NamedTuple):
    """The state of one slice of a parameter.

    Args:
        updates: How often it was updated, as far as the state tells.
        rank: Whose it is.
        rows: Dtype and shape of a row of each tensor that is sliced with the parameter.
    """

    updates: float
    rank: int
    rows: dict[str, tuple[torch.dtype, torch.Size]]


class _State(NamedTuple):
    """What the ranks must know of each other's states.

    Args:
        slices: By the name of the parameter and the slice's number.
        numbers: Of what are no tensors, by parameter and entry.
    """

    slices: dict[tuple[str, int], _Slice]
    numbers: dict[str, dict[str, Json]]


class _Lead(NamedTuple):
    """Of a sharded parameter: whose numbers count, which rows its state has, and which slices have one."""

    slice: _Slice
    begun: set[int]


def _states(held: Held) -> Iterator[tuple[str, nn.Parameter, State]]:
    """The parameters that this rank stores, with their states."""
    for name, parameter in held.parameters.items():
        if held.holds(name):
            yield name, parameter, held.optimizer.state.get(parameter) or {}


def _state_of(held: Held, rank: int) -> _State:
    found = _State({}, {})
    for name, parameter, state in _states(held):
        stored_name = held.tied.get(name, name)
        numbers: dict[str, Json] = {}
        rows: dict[str, tuple[torch.dtype, torch.Size]] = {}
        for entry, value in state.items():
            if not isinstance(value, Tensor):
                with suppress(TypeError):  # neither a tensor nor a number
                    numbers[entry] = hyperparameters.encoded(value)
            elif held.has_rows(name, parameter, entry, value):
                rows[entry] = value.dtype, value.shape[1:]
        if state and held.slices(name):
            found.slices[stored_name, held.mesh.rank("ep")] = _Slice(float(state.get("step", 1)), rank, rows)
        if numbers:
            found.numbers[stored_name] = numbers
    return found


def _leads(states: Iterable[_State]) -> dict[str, _Lead]:
    """The slice that was updated most, of each sharded parameter."""
    leads: dict[str, _Lead] = {}
    for state in states:
        for (name, number), one in state.slices.items():
            lead = leads.setdefault(name, _Lead(one, set()))
            lead.begun.add(number)
            if one.updates > lead.slice.updates:
                leads[name] = _Lead(one, lead.begun)
    return leads


def _numbers(states: Iterable[_State], leads: Mapping[str, _Lead]) -> dict[str, dict[str, Json]]:
    numbers: dict[str, dict[str, Json]] = {}
    for rank, state in enumerate(states):
        for name, entries in state.numbers.items():
            if name not in leads or leads[name].slice.rank == rank:
                numbers.setdefault(name, entries)
    return numbers


def _state_tensors(held: Held, rank: int, leads: Mapping[str, _Lead]) -> dict[str, Tensor]:
    """Of sharded parameters the rows of every rank, and the rest of the one rank that leads."""
    tensors: dict[str, Tensor] = {}
    for name, parameter, state in _states(held):
        stored_name = held.tied.get(name, name)
        lead = leads.get(stored_name)
        for entry, value in state.items():
            if isinstance(value, Tensor):
                rows = held.has_rows(name, parameter, entry, value)
                if rows or lead is None or lead.slice.rank == rank:
                    tensors[f"optimizer.{stored_name}.{entry}"] = held.whole(value, name) if rows else value
        if lead is not None and held.mesh.rank("ep") not in lead.begun:
            for entry, (dtype, row) in lead.slice.rows.items():
                zeros = torch.zeros(*parameter.shape[:1], *row, dtype=dtype, device=parameter.device)
                tensors[f"optimizer.{stored_name}.{entry}"] = held.whole(zeros, name)
    return tensors


def _check_options(step: object, config: Mapping[str, Any], keep: int) -> None:
    if keep < 1:
        raise ValueError(f"keep={keep} would remove the checkpoint just written; use keep=1 or more")
    if type(step) is not int or not 0 <= step < MOST_STEPS:
        raise ValueError(f"step={quoted(step)}; allowed: a whole number, 0 or more")
    try:
        json.dumps(dict(config))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"config={quoted(config)}: {cut(str(error))}; allowed: JSON values") from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warning that DCP gives for the documented `no_dist=True`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
