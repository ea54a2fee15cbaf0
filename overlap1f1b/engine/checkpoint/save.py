"""Saving of a training run, and resuming on any layout of ranks.

    step = load_checkpoint(engine, "runs/x", optimizer)  # 0 if there is none
    save_checkpoint(engine, "runs/x", step, optimizer)
    saving = save_checkpoint(engine, "runs/x", step, optimizer, background=True)

A checkpoint is written by torch.distributed.checkpoint (DCP) into a folder that gets its name when every rank has
finished, see :mod:`.folder`. Ranks exchange DCP's plans over the engine's mesh, not over torch's default group. So no
wait is longer than the engine's limit, and all ranks raise the failure of one rank. In the background a thread writes
copies, over groups of its own.

Tensors are stored once, under the names of the whole model: parameters and buffers as ``model.<name>``, optimizer
state as ``optimizer.<parameter>.<entry>``. Pipeline ranks store the blocks that they train. A parameter of Experts is
an equal slice of dimension 0 on each rank that shares the experts, rank 0 first. DCP gets it as a
:class:`.tensors.Slice` of the full shape, and likewise its optimizer state if that has the same rows. FSDP2 shards and
tensor-parallel parameters are DTensors, which DCP knows.
Everything else is equal on all ranks that hold it.

A parameter that was never updated has no optimizer state, so none is stored. If only some slices of a parameter have
state, the others are stored as zeros, which is the state of rows that never had a gradient.

DCP keeps its index as a pickle: load only checkpoints from people you trust.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, overload

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from overlap1f1b.engine.checkpoint.background import Saving
from overlap1f1b.engine.checkpoint.folder import (
    STEP_LIMIT,
    Contents,
    Fingerprint,
    abandon,
    begin,
    check_files,
    checkpoint_in,
    damaged,
    fingerprints,
    name_of,
    of_another_run,
    publish,
    read_contents,
)
from overlap1f1b.engine.checkpoint.hyperparameters import (
    GroupNumbers,
    Json,
    StoredGroups,
    decoded,
    describe_groups,
    encoded,
    groups_of,
    set_groups,
)
from overlap1f1b.engine.checkpoint.state import States, choose_files, file_of, pack, unpack, with_random
from overlap1f1b.engine.checkpoint.tensors import Index, Slice, read_index, read_tensors, zeros_like_rows
from overlap1f1b.engine.engine import Engine
from overlap1f1b.engine.reduce.tied import ties_in
from overlap1f1b.engine.run.blocks import marked_as_slice
from overlap1f1b.moe import Experts
from overlap1f1b.schedule.values import quoted, shortened
from overlap1f1b.transport.boundary import is_partial
from overlap1f1b.transport.failures import LostRankError
from overlap1f1b.transport.mesh import DIMENSIONS, Mesh, Together

_THREAD = "checkpoint"  # purpose of the groups over which background threads of all ranks meet

State = dict[str, Any]
Stored = Literal["all", "trained", "none"]


@overload
def save_checkpoint(
    engine: Engine,
    directory: Path | str,
    step: int,
    optimizer: torch.optim.Optimizer,
    *,
    state: States | None = None,
    config: Mapping[str, Any] | None = None,
    keep: int = 2,
    model: Stored = "all",
    background: Literal[False] = False,
) -> Path: ...


@overload
def save_checkpoint(
    engine: Engine,
    directory: Path | str,
    step: int,
    optimizer: torch.optim.Optimizer,
    *,
    state: States | None = None,
    config: Mapping[str, Any] | None = None,
    keep: int = 2,
    model: Stored = "all",
    background: Literal[True],
) -> Saving: ...


def save_checkpoint(
    engine: Engine,
    directory: Path | str,
    step: int,
    optimizer: torch.optim.Optimizer,
    *,
    state: States | None = None,
    config: Mapping[str, Any] | None = None,
    keep: int = 2,
    model: Stored = "all",
    background: bool = False,
) -> Path | Saving:
    """Write a training run to ``directory/step-00000100``, and return that path.

    The checkpoint has the model, the optimizer's state, every rank's random numbers (Python's, NumPy's, torch's), and
    ``state``. All ranks must call this. A mesh with other numbers of ranks, along any dimension, can resume from the
    checkpoint. Stages that are given as plain lists have their stage numbers in the parameters' names, so only a run
    with the same stages can read them.

    Args:
        engine: Engine of the model.
        directory: Folder that all ranks see.
        step: Number of training steps so far.
        optimizer: Optimizer of the engine's parameters. The checkpoint has its state and, from its parameter groups,
            every number, text or tuple of these (``lr``, ``weight_decay``, a scheduler's entries), but not the way in
            which a step is computed (``foreach``, ``fused``, ``capturable``, ``differentiable``).
        state: Objects with ``state_dict`` and ``load_state_dict``, by name: a learning rate's scheduler, a dataloader,
            a gradient scaler. A state that is equal on all ranks is read by ranks of any layout; one that each rank has
            of its own, by ranks of the same layout.
        config: JSON values that a run must share with this one to resume from it.
        keep: Number of checkpoints that stay in the directory.
        model: Tensors of the model that are stored: ``"all"``; ``"trained"``, without parameters that require no
            gradient; or ``"none"``, where the model is stored elsewhere. The run that loads the checkpoint keeps its
            own in place of others.
        background: Whether to copy the tensors to the CPU, and to write them while the next steps run. The result is
            then a :class:`Saving`, whose ``result()`` waits. The next call, ``load_checkpoint`` and ``engine.close()``
            wait, too, and raise the error of a checkpoint whose result has not been asked.

    Raises:
        ValueError: ``keep`` is below 1, ``model`` is none of these, the mesh does not have all ranks, or a state cannot
            be stored.
        OSError: A rank cannot write; raised on every rank.
        RuntimeError: A rank failed in another way; the message on every rank names it. A LostRankError if a rank did
            not answer within the engine's limit; the slowest rank must write its part within this limit.
    """
    directory = Path(directory)
    name = name_of(step) if type(step) is int else f"step {quoted(step)}"
    failed = f"checkpoint {directory / name} cannot be written"
    engine.wait_for_checkpoint()
    with engine.guarded(lambda: "in save_checkpoint", (LostRankError, KeyboardInterrupt)):
        together = Together(engine.mesh, failed)
        writing = _Writing(engine, optimizer, together, step, state, config or {}, keep, model)
        writing.accept(together.each(writing.describe))
        writing.begin(together.first(lambda: begin(directory, step)))
        plans = together.each(writing.plan)
        writing.own = together.first(lambda: writing.merge(plans))[together.rank]
        if not background:
            return _finish(writing, together)
        together.each(writing.copy)
        aside = Together(engine.mesh.beside(_THREAD), failed)

    def write() -> Path:
        try:
            return _finish(writing, aside)
        except LostRankError as error:
            engine.failures.explain(error)
            raise

    engine.saving = Saving(write)
    return engine.saving


def _finish(writing: _Writing, together: Together) -> Path:
    try:
        written = together.each(writing.write, OSError)
    except OSError as error:
        free = together.first(lambda: abandon(writing.folder))
        raise OSError(f"{error} ({free / 2**20:.0f} MiB are free)") from error.__cause__
    return together.first(lambda: writing.publish(written))


def load_checkpoint(
    engine: Engine,
    directory: Path | str,
    optimizer: torch.optim.Optimizer,
    *,
    state: States | None = None,
    config: Mapping[str, Any] | None = None,
) -> int:
    """Fill the model and the optimizer from the last checkpoint in ``directory``, and return its number of steps.

    All ranks must call this, before the first step or between two steps. In the layout in which the checkpoint was
    written every rank's random numbers go on as they did; in another they are left as they are.

    Args:
        engine: Engine of the model, over any number of ranks.
        directory: Folder given to :func:`save_checkpoint`, or one checkpoint in it. Without a checkpoint nothing
            changes and the result is 0.
        optimizer: Optimizer of the engine's parameters, possibly a new one. Each group gets the learning rate and the
            other numbers that its parameters were saved with, on any rank.
        state: Objects for every ``state`` of :func:`save_checkpoint`; their ``load_state_dict`` is called last. None in
            place of an object leaves a state out; ``{"random": None}`` leaves random numbers as they are.
        config: The ``config`` of :func:`save_checkpoint`.

    Raises:
        ValueError: The checkpoint has another configuration, model or other states (the message has the first
            difference), its optimizer had other parameter groups, it is damaged, or the mesh does not have all ranks.
        RuntimeError: A rank failed in another way, or did not answer, as for :func:`save_checkpoint`.
    """
    engine.wait_for_checkpoint()
    with engine.guarded(lambda: "in load_checkpoint", (LostRankError, KeyboardInterrupt)):
        together = Together(engine.mesh, f"{directory} cannot be searched")
        checkpoint = together.first(lambda: checkpoint_in(Path(directory)))
        if checkpoint is None:
            return 0
        together = Together(engine.mesh, f"checkpoint {checkpoint} cannot be loaded")
        contents = together.first(lambda: read_contents(checkpoint, config or {}))
        names = sorted(contents.files)
        together.each(lambda: check_files(checkpoint, contents.files, names[together.rank :: together.size]))
        reading = _Reading(engine, optimizer, checkpoint, contents, state)
        reading.check_groups(together.each(reading.compare))
        together.each(reading.prepare)
        together.each(reading.fill)
        together.each(reading.fill_states)
        return contents.step


class _Held:
    """Tensors of the model and the optimizer that this rank holds, with their names in the whole model.

    Raises:
        ValueError: The optimizer has a parameter that is not the model's.
    """

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.mesh, given = optimizer, engine.mesh, engine.model
        self.blocks: Collection[str] | None = None  # children that this rank trains; None for all
        ties: dict[nn.Parameter, str] = {}
        self.columns: dict[str, int] = {}
        """Number of this rank's experts in parameters whose columns, in each of equal parts, are sorted by expert."""
        if isinstance(given, Mapping):
            self.model = nn.Module()
            for number, stage in given.items():
                if (hang := getattr(stage, "hang", None)) is not None:
                    hang(self.model)
                else:
                    self.model.add_module(str(number), stage if isinstance(stage, nn.Module) else nn.ModuleList(stage))
                ties |= {p: name for name, p in ties_in(stage).items()}
                self.columns |= getattr(stage, "__dict__", {}).get("columns", {})
        else:
            self.model = given if isinstance(given, nn.Module) else nn.ModuleList(given)
            own = {block for stage in engine.stages.values() for block in stage.blocks}
            self.blocks = {name for name, child in self.model._modules.items() if child in own}
        self.slice, self.slices = self.mesh.expert_slice
        self.sliced = {
            f"{path}.{label}".lstrip(".")
            for path, module in self.model.named_modules(remove_duplicate=False)
            if self.slices > 1
            for label, parameter in module.named_parameters(recurse=isinstance(module, Experts), remove_duplicate=False)
            if (isinstance(module, Experts) and parameter not in engine.sharding.sliced) or marked_as_slice(parameter)
        }
        """Names of parameters that are sliced over the ranks that share the experts, without a DTensor that says so."""
        self._tied = {name: ties[p] for name, p in self.model.named_parameters() if p in ties}
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        self.parameters: dict[str, nn.Parameter] = {}
        """Parameters that the optimizer updates, by name, in the optimizer's order."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in names:
                    raise ValueError(
                        f"the optimizer has a parameter of shape {list(parameter.shape)} that this rank's model does "
                        "not have; allowed: an optimizer of the engine's parameters"
                    )
                self.parameters[names[parameter]] = parameter

    def states(self) -> Iterator[tuple[str, nn.Parameter, State]]:
        """Yield name, parameter and optimizer state of each parameter that this rank stores."""
        for name, parameter in self.parameters.items():
            if self.holds(name):
                yield name, parameter, self.optimizer.state.get(parameter) or {}

    def tensors(self, stored: Stored) -> dict[str, Tensor]:
        """Return the model's tensors as they are stored, by name."""
        if stored == "none":
            return {}
        state = self.model.state_dict()
        renamed = sorted(self.sliced - state.keys())
        if renamed:
            raise ValueError(
                f"the model's state_dict has no {renamed[0]}, a parameter of experts that ranks share; allowed: a "
                "state_dict with the parameters' names"
            )
        frozen = {name for name, p in self.model.named_parameters(remove_duplicate=False) if not p.requires_grad}
        left = frozen if stored == "trained" else set()
        return {
            f"model.{name}": self.whole(tensor, name)
            for name, tensor in state.items()
            if self.holds(name) and name not in left
        }

    @property
    def stored_names(self) -> dict[nn.Parameter, str]:
        """Names under which the state of the optimizer's parameters is stored."""
        return {parameter: self.stored_name(name) for name, parameter in self.parameters.items()}

    def stored_name(self, name: str) -> str:
        """Return the one name that a parameter shares with its copies on other stages."""
        return self._tied.get(name, name)

    def holds(self, name: str) -> bool:
        """Return whether this rank stores a parameter."""
        return self.blocks is None or name.partition(".")[0] in self.blocks

    def whole(self, tensor: Tensor, name: str) -> Tensor:
        """Return ``tensor``, or the whole whose slice on this rank it is. Both share its memory.

        Columns that are sorted by expert are stored as rows: ``[out, r·E]`` as ``[E, out·r]``.
        """
        tensor = tensor.detach()
        if (experts := self.columns.get(name)) is not None:
            tensor = tensor.view(-1, experts).t()
        if name not in self.sliced:
            return tensor
        return Slice(tensor, self.slice, self.slices)

    def is_shared(self, name: str) -> bool:
        """Return whether ranks hold different parts of a parameter."""
        return name in self.sliced or isinstance(self.parameters[name], DTensor)

    def has_rows(self, name: str, parameter: Tensor, entry: str, value: Tensor) -> bool:
        """Return whether ranks hold different parts of a tensor of the optimizer's state, as of its parameter.

        Raises:
            ValueError: The tensor is neither a single number nor has a row for each row of the parameter, or it is a
                DTensor that ranks have not summed yet.
        """
        if isinstance(value, DTensor) and is_partial(value):
            raise ValueError(
                f"the optimizer's {entry} of {name} has placements {value.placements}; allowed: shards or copies"
            )
        rows = value.shape == parameter.shape or (
            name not in self.columns and value.numel() > 1 and value.shape[:1] == parameter.shape[:1]
        )
        if self.is_shared(name) and value.numel() > 1 and not rows:
            raise ValueError(
                f"the optimizer's {entry} of {name} has shape {list(value.shape)}; allowed for a part of shape "
                f"{list(parameter.shape)} that ranks share: {parameter.shape[0]} rows, or a single number"
            )
        return rows and (self.is_shared(name) or name in self.columns)


class _SliceState(NamedTuple):
    """Optimizer state of one rank's slice of a parameter."""

    number: int  # of the slice
    rank: int
    updates: float  # of the slice, if the state has their number
    rows: dict[str, tuple[torch.dtype, torch.Size]]  # of each tensor that is sliced like the parameter


class _Description(NamedTuple):
    """Description of a rank's tensors and groups, which the other ranks need before all of them write."""

    step: int
    groups: list[GroupNumbers]
    slices: dict[str, _SliceState]  # of this rank, by the parameter's name
    numbers: dict[str, dict[str, Json]]  # state that is not a tensor, by parameter and entry
    states: dict[str, int]  # checksum of each of the run's states
    columns: dict[str, int]  # rows of parameters whose columns are stored as rows


class _Copies(DefaultSavePlanner):
    """DCP's planner, which may write copies of the tensors that it has planned."""

    copies: dict[MetadataIndex, Tensor] | None = None

    def copy(self, plan: SavePlan) -> None:
        """Copy the tensors that this rank writes to the CPU."""
        self.copies = {}
        for item in plan.items:
            tensor = super().resolve_data(item)
            assert isinstance(tensor, Tensor)
            self.copies[item.index] = tensor.detach().to("cpu", copy=True)

    def resolve_data(self, write_item: WriteItem) -> Any:
        return super().resolve_data(write_item) if self.copies is None else self.copies[write_item.index]


@dataclass
class _Writing:
    """One rank's part in writing a checkpoint; the methods are its phases, in order."""

    engine: Engine
    optimizer: torch.optim.Optimizer
    together: Together
    step: int
    state: States | None
    config: Mapping[str, Any]
    keep: int
    model: Stored
    own: SavePlan = field(init=False)
    """DCP's plan of the tensors that this rank writes."""

    def describe(self) -> _Description:
        """Check the options and return the description of this rank."""
        if self.keep < 1:
            raise ValueError(f"keep={self.keep} would remove the checkpoint just written; use keep=1 or more")
        if type(self.step) is not int or not 0 <= self.step < STEP_LIMIT:
            raise ValueError(f"step={quoted(self.step)}; allowed: a whole number, 0 or more")
        if self.model not in (allowed := get_args(Stored)):
            raise ValueError(f"model={quoted(self.model)}; allowed: {', '.join(allowed)}")
        try:
            self.config = dict(self.config)
            json.dumps(self.config)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"config={quoted(self.config)}: {shortened(str(error))}; allowed: JSON values") from None
        self.held = held = _Held(self.engine, self.optimizer)
        self.tensors = held.tensors(self.model)
        self._packed = pack(with_random(self.state))
        states = {name: zlib.crc32(content) for name, content in self._packed.items()}
        columns = {name: len(held.parameters[name]) for name in held.columns if name in held.parameters}
        found = _Description(self.step, groups_of(self.optimizer, held.stored_names), {}, {}, states, columns)
        for name, parameter, state in held.states():
            stored_name = held.stored_name(name)
            numbers: dict[str, Json] = {}
            rows: dict[str, tuple[torch.dtype, torch.Size]] = {}
            for entry, value in state.items():
                if not isinstance(value, Tensor):
                    with suppress(TypeError):  # neither a tensor nor a number
                        numbers[entry] = encoded(value)
                elif held.has_rows(name, parameter, entry, value):
                    rows[entry] = value.dtype, value.shape[1:]
            if state and name in held.sliced:
                updates = float(state.get("step", 1))
                found.slices[stored_name] = _SliceState(held.slice, self.together.rank, updates, rows)
            if numbers:
                found.numbers[stored_name] = numbers
        return found

    def accept(self, every: list[_Description]) -> None:
        """Compare the steps of all ranks, and choose the rank whose state is stored if ranks differ."""
        if len({one.step for one in every}) > 1:
            steps = sorted({one.step for one in every})
            raise ValueError(f"{self.together.failed}: ranks have steps {steps}; allowed: the same on all ranks")
        for rank, one in enumerate(every):
            if difference := every[0].states.keys() ^ one.states.keys():
                raise ValueError(
                    f"{self.together.failed}: only one of ranks 0 and {rank} has state[{min(difference)!r}]; "
                    "allowed: the same names on all ranks"
                )
        self._shared_states = {name for name in every[0].states if len({one.states[name] for one in every}) == 1}
        slices: dict[str, list[_SliceState]] = {}
        for name, state in (entry for one in every for entry in one.slices.items()):
            slices.setdefault(name, []).append(state)
        self._leads = {name: max(states, key=lambda state: state.updates) for name, states in slices.items()}
        self._begun = {name: {state.number for state in states} for name, states in slices.items()}
        numbers: dict[str, dict[str, Json]] = {}
        for rank, one in enumerate(every):
            for name, entries in one.numbers.items():
                if name not in self._leads or self._leads[name].rank == rank:
                    numbers.setdefault(name, entries)
        groups = describe_groups([one.groups for one in every])
        self._added = {"groups": groups, "state": numbers, "layout": self.held.mesh.layout}
        if columns := {name: rows for one in every for name, rows in one.columns.items()}:
            self._added["columns"] = columns
        if self.model != "all":
            self._added["model"] = self.model

    def begin(self, folder: Path) -> None:
        """Prepare to write into ``folder``."""
        self.folder = folder
        self._planner, self._writer = _Copies(), FileSystemWriter(folder)

    def plan(self) -> SavePlan:
        """Return DCP's plan of all tensors that this rank could write."""
        first, rank = self.together.rank == 0, self.together.rank
        stored = self.tensors | self._state_tensors()
        self._planner.set_up_planner(stored, storage_meta=self._writer.storage_meta(), is_coordinator=first)
        self._writer.set_up_storage_writer(first, rank=rank, use_collectives=True)
        return self._writer.prepare_local_plan(self._planner.create_local_plan())

    def _state_tensors(self) -> dict[str, Tensor]:
        # For sliced parameters every rank stores its rows; the rank with the most updates stores everything else.
        held, rank = self.held, self.together.rank
        tensors: dict[str, Tensor] = {}
        for name, parameter, state in held.states():
            stored_name = held.stored_name(name)
            lead = self._leads.get(stored_name)
            for entry, value in state.items():
                if isinstance(value, Tensor):
                    rows = held.has_rows(name, parameter, entry, value)
                    if rows or lead is None or lead.rank == rank:
                        tensors[f"optimizer.{stored_name}.{entry}"] = held.whole(value, name) if rows else value
            if lead is not None and held.slice not in self._begun[stored_name]:
                for entry, (dtype, row) in lead.rows.items():
                    zeros = zeros_like_rows(parameter, row, dtype)
                    tensors[f"optimizer.{stored_name}.{entry}"] = held.whole(zeros, name)
        return tensors

    def merge(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the first rank: divide the tensors that several ranks hold, and keep the index for :meth:`publish`."""
        every, self._index = self._planner.create_global_plan(plans)
        return self._writer.prepare_global_plan(every)

    def copy(self) -> None:
        """Copy what this rank writes, before the next step changes it."""
        self._planner.copy(self.own)

    def write(self) -> tuple[list[WriteResult], dict[str, Fingerprint]]:
        """Write this rank's files; return DCP's results and the fingerprints of the files."""
        results = self._writer.write_data(self._planner.finish_plan(self.own), self._planner)
        results.wait()
        names = [path.name for path in self.folder.glob(f"__{self.together.rank}_*")]
        for name, content in self._packed.items():
            shared = name in self._shared_states
            if not shared or self.together.rank == 0:
                names.append(file_of(name, None if shared else _number(self.held.mesh)))
                with (self.folder / names[-1]).open("wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
        return results.value(), fingerprints(self.folder, names)

    def publish(self, written: list[tuple[list[WriteResult], dict[str, Fingerprint]]]) -> Path:
        """On the first rank: write the index and give the checkpoint its name."""
        index: Metadata = self._index
        self._writer.finish(index, [results for results, _ in written])
        files = {name: fingerprint for _, known in written for name, fingerprint in known.items()}
        return publish(self.folder, self.step, config=self.config, keep=self.keep, files=files, added=self._added)


def _number(mesh: Mesh) -> int:
    """Return this rank's number in the order of the dimensions."""
    number = 0
    for name in DIMENSIONS:
        number = number * mesh.size(name) + mesh.rank(name)
    return number


class _Reading:
    """One rank's part in loading a checkpoint; the methods are its phases. Only the last two change the run."""

    def __init__(
        self,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        checkpoint: Path,
        contents: Contents,
        state: States | None,
    ) -> None:
        self.engine, self.optimizer, self.checkpoint, self.contents = engine, optimizer, checkpoint, contents
        self.state = state
        self._groups: StoredGroups | None = None
        self._chosen: list[dict[str, Any] | None] | None = None

    def compare(self) -> int:
        """Compare the checkpoint with this rank's tensors; return the number of the optimizer's groups."""
        self.held = held = _Held(self.engine, self.optimizer)
        added = self.contents.added
        self.tensors = held.tensors(added.get("model", "all") if isinstance(added, dict) else "all")
        self._copies: dict[str, list[str]] = {}  # names of all parameters that share a stored name
        for name in held.parameters:
            self._copies.setdefault(held.stored_name(name), []).append(name)
        self._state: dict[str, State] = {name: {} for name in held.parameters}
        numbers: dict[str, dict[str, Json]] = {}
        if added is not None:  # absent in checkpoints of early versions
            try:
                self._groups, numbers = StoredGroups.read(added["groups"]), dict(added["state"])
            except (KeyError, TypeError, ValueError) as error:
                raise self._unreadable(error) from None
        stored = read_index(self.checkpoint, self.contents.files)
        # Early versions stored a block that stands in two places under its first name alone.
        again = held.model._modules.keys() - dict(held.model.named_children())
        self.tensors = {key: t for key, t in self.tensors.items() if key in stored or key.split(".")[1] not in again}
        self._make_state(stored, numbers)
        self._compare_tensors(stored)
        return len(self.optimizer.param_groups)

    def check_groups(self, counts: list[int]) -> None:
        """Compare the numbers of all ranks' parameter groups with the checkpoint's, with one outcome on all ranks."""
        if self._groups is not None:
            with self._naming_checkpoint():
                self._groups.check_count(counts)

    def prepare(self) -> None:
        """Find the numbers of this rank's parameter groups, and read the run's states."""
        mesh, added = self.held.mesh, self.contents.added
        stored = added.get("layout", {}) if isinstance(added, dict) else {}
        with self._naming_checkpoint():
            if self._groups is not None:
                self._chosen = self._groups.chosen(self.optimizer, self.held.stored_names)
            self._states = with_random(self.state)
            files = choose_files(self._states, self.contents.files, _number(mesh), mesh.layout, stored)
        self._packed = {name: (self.checkpoint / file).read_bytes() for name, file in files.items()}

    def fill(self) -> None:
        """Read all tensors into the model and the optimizer."""
        read_tensors(self.checkpoint, self.tensors)
        for first, *others in self._copies.values():
            for name in others:
                self._state[name] = {
                    entry: value.clone() if isinstance(value, Tensor) else value
                    for entry, value in self._state[first].items()
                }
        own = [dict(group) for group in self.optimizer.param_groups]
        state = {number: state for number, state in enumerate(self._state.values()) if state}
        self.optimizer.load_state_dict({"state": state, "param_groups": self.optimizer.state_dict()["param_groups"]})
        for group, before in zip(self.optimizer.param_groups, own, strict=True):
            # load_state_dict would replace tensors by copies, but a captured graph may read the tensors.
            group.update({key: value for key, value in before.items() if isinstance(value, Tensor)})
        if self._chosen is not None:
            set_groups(self.optimizer, self._chosen)

    def fill_states(self) -> None:
        """Give the run's objects their states."""
        unpack(self._states, self._packed)

    @contextmanager
    def _naming_checkpoint(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise ValueError(f"checkpoint {self.checkpoint}: {error}") from None

    def _unreadable(self, error: Exception) -> ValueError:
        return damaged(self.checkpoint, f"its optimizer cannot be read ({type(error).__name__})")

    def _make_state(self, stored: Index, numbers: Mapping[str, Mapping[str, Json]]) -> None:
        # The optimizer may be new: its state is made here, as the checkpoint describes it, and read in `fill`.
        held = self.held
        for key, meta in stored.items():
            kind, _, path = key.partition(".")
            stored_name, _, entry = path.rpartition(".")
            if kind != "optimizer" or stored_name not in self._copies:
                continue
            name = self._copies[stored_name][0]
            parameter = held.parameters[name]
            whole = held.whole(parameter, name).shape
            rows = meta.size == whole or (meta.size.numel() > 1 and held.is_shared(name))
            if rows and meta.size[:1] != whole[:1]:
                raise of_another_run(self.checkpoint, key, f"shape {list(meta.size)}", f"{whole[0]} rows")
            dtype = meta.properties.dtype
            row = parameter.shape[1:] if name in held.columns else meta.size[1:]
            value = zeros_like_rows(parameter, row, dtype) if rows else torch.empty(meta.size, dtype=dtype)
            self._state[name][entry] = value
            self.tensors[key] = held.whole(value, name) if rows else value
        try:
            for stored_name, (name, *_) in self._copies.items():
                entries = numbers.get(stored_name, {})
                self._state[name] |= {entry: decoded(value) for entry, value in entries.items()}
        except (ValueError, AttributeError, RuntimeError) as error:
            raise self._unreadable(error) from None

    def _compare_tensors(self, stored: Index) -> None:
        held, tensors = self.held, self.tensors
        partial = isinstance(self.engine.model, Mapping)  # other ranks' parameters may have any name
        elsewhere = {name for name in held.model._modules if not held.holds(name)}
        for key in tensors | dict(stored):
            if key.partition(".")[2].split(".")[0] in elsewhere or (partial and key not in tensors):
                continue
            here = f"{tensors[key].dtype}{list(tensors[key].shape)}" if key in tensors else "none"
            there = f"{stored[key].properties.dtype}{list(stored[key].size)}" if key in stored else "none"
            if here != there:
                raise of_another_run(self.checkpoint, key, there, here)
        if not any(self._state.values()):
            return
        # A parameter that was in the optimizer but never updated has no state; one outside of it is a difference.
        with_state = {stored_name for stored_name, (first, *_) in self._copies.items() if self._state[first]}
        known = with_state if self._groups is None else self._groups.of.keys()
        for stored_name, (first, *_) in self._copies.items():
            if stored_name not in known:
                raise of_another_run(self.checkpoint, f"optimizer.{first}", "none", "a state")
