"""Saving of a training run. :mod:`.load` resumes from it, on any layout of ranks.

    save_checkpoint(engine, "runs/x", step, optimizer)
    saving = save_checkpoint(engine, "runs/x", step, optimizer, background=True)

A checkpoint is written by torch.distributed.checkpoint (DCP) into a folder that gets its name when every rank has
finished, see :mod:`.folder`. Ranks exchange DCP's plans over the engine's mesh, not over torch's default group. So no
wait is longer than the engine's limit, and all ranks raise the failure of one rank. In the background a thread writes
copies, over groups of its own.

:mod:`.held` has the names of tensors. A parameter that was never updated has no optimizer state, so none is stored. If
only some slices of a parameter have state, the others are stored as zeros, which is the state of rows that never had a
gradient.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, overload

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from overlap1f1b.engine.checkpoint.background import Saving
from overlap1f1b.engine.checkpoint.folder import (
    STEP_LIMIT,
    Fingerprint,
    abandon,
    begin,
    fingerprints,
    name_of,
    publish,
    write_durably,
)
from overlap1f1b.engine.checkpoint.held import Held, Stored
from overlap1f1b.engine.checkpoint.hyperparameters import GroupNumbers, Json, describe_groups, encoded, groups_of
from overlap1f1b.engine.checkpoint.state import States, file_of, pack, with_random
from overlap1f1b.engine.checkpoint.tensors import zeros_like_rows
from overlap1f1b.engine.engine import Engine
from overlap1f1b.schedule.values import check_kind, check_size, quoted, shortened
from overlap1f1b.transport import streams
from overlap1f1b.transport.failures import LostRankError
from overlap1f1b.transport.together import Together

_THREAD = "checkpoint"  # purpose of the groups over which background threads of all ranks meet


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
    check_kind("engine", engine, Engine)
    check_kind("directory", directory, str, PathLike)
    directory = Path(directory)
    name = name_of(step) if type(step) is int else f"step {quoted(step)}"
    failed = f"checkpoint {directory / name} cannot be written"
    with engine.guarded(lambda: "in save_checkpoint", (LostRankError, KeyboardInterrupt)):
        engine.wait_for_checkpoint()
        together = Together(engine.mesh, failed)
        writing = _Writing(engine, optimizer, together, step, state, config or {}, keep, model)
        writing.accept(together.each(writing.describe))
        folder = together.first(lambda: begin(directory, step))
        plans = together.each(lambda: writing.plan(folder))
        writing.own = together.first(lambda: writing.merge(plans))[together.rank]
        if not background:
            return _finish(writing, together)
        together.each(lambda: writing.planner.copy(writing.own))  # before the next step changes the tensors
        aside = Together(engine.mesh.beside(_THREAD), failed)

    device = engine.boundary.device

    def write() -> Path:
        if streams.is_queued(device):  # a thread begins on the first GPU, where DCP's streams would take memory
            torch.cuda.set_device(device)
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
        check_size("keep", self.keep)
        if type(self.step) is not int or not 0 <= self.step < STEP_LIMIT:
            raise ValueError(f"step={quoted(self.step)}; allowed: a whole number, 0 or more")
        if self.model not in (allowed := get_args(Stored)):
            raise ValueError(f"model={quoted(self.model)}; allowed: {', '.join(allowed)}")
        try:
            self.config = dict(self.config)
            json.dumps(self.config)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"config={quoted(self.config)}: {shortened(str(error))}; allowed: JSON values") from None
        self.held = held = Held(self.engine, self.optimizer)
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
                    numbers[entry] = _number(entry, name, value)
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

    def plan(self, folder: Path) -> SavePlan:
        """Return DCP's plan of all tensors that this rank could write into a folder."""
        self.folder, self.planner, self._writer = folder, _Copies(), FileSystemWriter(folder)
        first, rank = self.together.rank == 0, self.together.rank
        stored = self.tensors | self._state_tensors()
        self.planner.set_up_planner(stored, storage_meta=self._writer.storage_meta(), is_coordinator=first)
        self._writer.set_up_storage_writer(first, rank=rank, use_collectives=True)
        return self._writer.prepare_local_plan(self.planner.create_local_plan())

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
        every, self._index = self.planner.create_global_plan(plans)
        return self._writer.prepare_global_plan(every)

    def write(self) -> tuple[list[WriteResult], dict[str, Fingerprint]]:
        """Write this rank's files; return DCP's results and the fingerprints of the files."""
        results = self._writer.write_data(self.planner.finish_plan(self.own), self.planner)
        results.wait()
        names = [path.name for path in self.folder.glob(f"__{self.together.rank}_*")]
        for name, content in self._packed.items():
            shared = name in self._shared_states
            if not shared or self.together.rank == 0:
                names.append(file_of(name, None if shared else self.held.number))
                write_durably(self.folder / names[-1], content)
        return results.value(), fingerprints(self.folder, names)

    def publish(self, written: list[tuple[list[WriteResult], dict[str, Fingerprint]]]) -> Path:
        """On the first rank: write the index and give the checkpoint its name."""
        index: Metadata = self._index
        self._writer.finish(index, [results for results, _ in written])
        files = {name: fingerprint for _, known in written for name, fingerprint in known.items()}
        return publish(self.folder, self.step, config=self.config, keep=self.keep, files=files, added=self._added)


def _number(entry: str, name: str, value: object) -> Json:
    """Return a value of the optimizer's state that is no tensor as JSON; raise ValueError if it would be lost."""
    with suppress(TypeError):
        if not isinstance(value, str):  # ``load_state_dict`` takes a text for a list and makes a generator of it
            return encoded(value)
    raise ValueError(
        f"the optimizer's {entry} of {name} is of type {type(value).__name__}; allowed: a tensor, a number, or a list "
        "of numbers and texts"
    )
