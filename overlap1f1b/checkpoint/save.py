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
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from overlap1f1b.checkpoint.background import Saving
from overlap1f1b.checkpoint.contents import Held, Stored
from overlap1f1b.checkpoint.folder import (
    Fingerprint,
    abandon,
    begin,
    fingerprints,
    name_of,
    publish,
    write_durably,
)
from overlap1f1b.checkpoint.optimizer import Listed, Table, is_large
from overlap1f1b.checkpoint.state import OPTIMIZER, States, dumped, file_of, pack, with_random
from overlap1f1b.engine.engine import Engine
from overlap1f1b.schedule.values import check_kind, check_size, quoted, shortened
from overlap1f1b.transport import devices
from overlap1f1b.transport.consensus import Together
from overlap1f1b.transport.failures import LostRankError

_THREAD = "checkpoint"  # purpose of the groups over which background threads of all ranks meet


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
) -> Saving:
    """Write a training run to ``directory/step-00000100``, and return a future of that path.

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
        background: Whether to copy the tensors to the CPU, and to write them while the next steps run;
            otherwise the result is there when this returns. The next call, ``load_checkpoint`` and ``engine.close()``
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
    saving = Saving()
    with engine.guarded(lambda: "in save_checkpoint", (LostRankError, KeyboardInterrupt)):
        engine.wait_for_checkpoint()
        together = Together(engine.mesh, failed)
        writing = _Writing(engine, optimizer, together, step, state, config or {}, keep, model)
        writing.accept(together.each(writing.describe))
        folder = together.first(lambda: begin(directory, step))
        plans = together.each(lambda: writing.plan(folder))
        writing.own = together.first(lambda: writing.merge(plans))[together.rank]
        if not background:
            saving.set_result(_finish(writing, together))
            return saving
        together.each(lambda: writing.planner.copy(writing.own))  # before the next step changes the tensors
        aside = Together(engine.mesh.beside(_THREAD), failed)

    device = engine.connection.device
    gpu = devices.of(device)

    def write() -> Path:
        if gpu is not None:  # a thread begins on the first GPU, where DCP's streams would take memory
            gpu.set_device(device)
        try:
            return _finish(writing, aside)
        except LostRankError as error:
            engine.mesh.failures.explain(error)
            raise

    engine.wait_later(saving.settle)
    saving.begin(write)
    return saving


def _finish(writing: _Writing, together: Together) -> Path:
    try:
        written = together.each(writing.write, OSError)
    except OSError as error:
        free = together.first(lambda: abandon(writing.folder))
        raise OSError(f"{error} ({free / 2**20:.0f} MiB are free)") from error.__cause__
    return together.first(lambda: writing.publish(written))


class _Description(NamedTuple):
    """What the other ranks need to know of a rank before all of them write."""

    step: int
    optimizer: Listed
    states: dict[str, int]  # checksum of each of the run's states


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
        if type(self.step) is not int or self.step < 0:
            raise ValueError(f"step={quoted(self.step)}; allowed: a whole number, 0 or more")
        if self.model not in (allowed := get_args(Stored)):
            raise ValueError(f"model={quoted(self.model)}; allowed: {', '.join(allowed)}")
        try:
            self.config = dict(self.config)
            json.dumps(self.config)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"config={quoted(self.config)}: {shortened(str(error))}; allowed: JSON values") from None
        self.held = held = Held(self.engine, self.optimizer)
        listed, large = held.listed()
        self.tensors = held.tensors(self.model) | large
        self._packed = pack(with_random(self.state))
        states = {name: zlib.crc32(content) for name, content in self._packed.items()}
        return _Description(self.step, listed, states)

    def accept(self, every: list[_Description]) -> None:
        """Compare the descriptions of all ranks, and choose what this rank stores."""
        if len({one.step for one in every}) > 1:
            steps = sorted({one.step for one in every})
            raise ValueError(f"{self.together.failed}: ranks have steps {steps}; allowed: the same on all ranks")
        for rank, one in enumerate(every):
            if difference := every[0].states.keys() ^ one.states.keys():
                raise ValueError(
                    f"{self.together.failed}: only one of ranks 0 and {rank} has state[{min(difference)!r}]; "
                    "allowed: the same names on all ranks"
                )
        held, first = self.held, self.together.rank == 0
        self._files: dict[str, bytes] = {}
        for name, content in self._packed.items():
            shared = len({one.states[name] for one in every}) == 1
            if first or not shared:
                self._files[file_of(name, None if shared else held.number)] = content
        ranks = [one.optimizer for one in every]
        table = Table.merged(ranks)
        if first:
            self._files[OPTIMIZER] = dumped(table._asdict())
        begun = {(name, rank.slice) for rank in ranks for name in rank.state}
        for name in held.sliced & held.parameters.keys():
            stored_name = held.stored_name(name)
            if held.holds(name) and (stored_name, held.slice) not in begun:
                large = {entry: v for entry, v in table.state.get(stored_name, {}).items() if is_large(v)}
                self.tensors |= {f"optimizer.{stored_name}.{e}": held.zeros(name, e, v)[1] for e, v in large.items()}
        self._added: dict[str, Any] = {"layout": held.mesh.layout}
        if self.model != "all":
            self._added["model"] = self.model

    def plan(self, folder: Path) -> SavePlan:
        """Return DCP's plan of all tensors that this rank could write into a folder."""
        self.folder, self.planner, self._writer = folder, _Copies(), FileSystemWriter(folder)
        first, rank = self.together.rank == 0, self.together.rank
        self.planner.set_up_planner(self.tensors, storage_meta=self._writer.storage_meta(), is_coordinator=first)
        self._writer.set_up_storage_writer(first, rank=rank, use_collectives=True)
        return self._writer.prepare_local_plan(self.planner.create_local_plan())

    def merge(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the first rank: divide the tensors that several ranks hold, and keep the index for :meth:`publish`."""
        every, self._index = self.planner.create_global_plan(plans)
        return self._writer.prepare_global_plan(every)

    def write(self) -> tuple[list[WriteResult], dict[str, Fingerprint]]:
        """Write this rank's files; return DCP's results and the fingerprints of the files."""
        results = self._writer.write_data(self.planner.finish_plan(self.own), self.planner)
        results.wait()
        for name, content in self._files.items():
            write_durably(self.folder / name, content)
        names = [path.name for path in self.folder.glob(f"__{self.together.rank}_*")]
        return results.value(), fingerprints(self.folder, [*names, *self._files])

    def publish(self, written: list[tuple[list[WriteResult], dict[str, Fingerprint]]]) -> Path:
        """On the first rank: write the index and give the checkpoint its name."""
        index: Metadata = self._index
        self._writer.finish(index, [results for results, _ in written])
        files = {name: fingerprint for _, known in written for name, fingerprint in known.items()}
        return publish(self.folder, self.step, config=self.config, keep=self.keep, files=files, added=self._added)
