"""Resuming of a training run from a checkpoint, on any layout of ranks.

    step = load_checkpoint(engine, "runs/x", optimizer)  # 0 if there is none

DCP keeps its index as a pickle: load only checkpoints from people you trust.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overlap1f1b.checkpoint.contents import Held
from overlap1f1b.checkpoint.folder import (
    Contents,
    check_files,
    checkpoint_in,
    damaged,
    of_another_run,
    read_contents,
)
from overlap1f1b.checkpoint.optimizer import State, Table, is_large, set_groups
from overlap1f1b.checkpoint.state import OPTIMIZER, States, choose_files, loaded, unpack, with_random
from overlap1f1b.checkpoint.tensors import Index, read_index, read_tensors
from overlap1f1b.engine.engine import Engine
from overlap1f1b.schedule.values import check_kind
from overlap1f1b.transport.consensus import Together
from overlap1f1b.transport.failures import LostRankError


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
    check_kind("engine", engine, Engine)
    check_kind("directory", directory, str, PathLike)
    with engine.guarded(lambda: "in load_checkpoint", (LostRankError, KeyboardInterrupt)):
        engine.wait_for_checkpoint()
        together = Together(engine.mesh, f"{directory} cannot be searched")
        checkpoint = together.first(lambda: checkpoint_in(Path(directory)))
        if checkpoint is None:
            return 0
        together = Together(engine.mesh, f"checkpoint {checkpoint} cannot be loaded")
        contents = together.first(lambda: read_contents(checkpoint, config or {}))
        names = sorted(contents.files)
        together.each(lambda: check_files(checkpoint, contents.files, names[together.rank :: together.size]))
        reading = _Reading(engine, optimizer, checkpoint, contents, state)
        groups = together.each(reading.compare)
        together.each(lambda: reading.prepare(groups))
        together.each(reading.fill)
        together.each(lambda: unpack(reading.states, reading.packed))
        return contents.step


@dataclass
class _Reading:
    """One rank's part in loading a checkpoint; the methods are its phases. Only the last one changes the run."""

    engine: Engine
    optimizer: torch.optim.Optimizer
    checkpoint: Path
    contents: Contents
    state: States | None

    def compare(self) -> int:
        """Compare the checkpoint with this rank's tensors; return the number of the optimizer's groups."""
        self.held = held = Held(self.engine, self.optimizer)
        self.tensors = held.tensors(self.contents.added.get("model", "all"))
        try:
            self._layout = dict(self.contents.added["layout"])
            self._table = Table(**loaded((self.checkpoint / OPTIMIZER).read_bytes()))
        except Exception as error:  # unpickling raises whatever the content asks for
            raise damaged(self.checkpoint, f"its optimizer cannot be read ({type(error).__name__})") from None
        stored = read_index(self.checkpoint, self.contents.files)
        held.make_extra_states(self.tensors, stored)
        with self._naming_checkpoint():
            self._make_state()
        self._compare_tensors(stored)
        return len(self.optimizer.param_groups)

    def prepare(self, groups: list[int]) -> None:
        """Find the numbers of this rank's parameter groups, of which ranks have so many; read the run's states."""
        held = self.held
        with self._naming_checkpoint():
            self._table.check_count(groups)
            self._chosen = self._table.chosen(self.optimizer, held.stored_names)
            self.states = with_random(self.state)
            files = choose_files(self.states, self.contents.files, held.number, held.mesh.layout, self._layout)
        self.packed = {name: (self.checkpoint / file).read_bytes() for name, file in files.items()}

    def fill(self) -> None:
        """Read all tensors into the model and the optimizer."""
        read_tensors(self.checkpoint, self.tensors)
        self.held.set_extra_states(self.tensors)
        for name, first in self._copies.items():
            self._state[name] = deepcopy(self._state[first])
        own = [dict(group) for group in self.optimizer.param_groups]
        state = {number: state for number, state in enumerate(self._state.values()) if state}
        self.optimizer.load_state_dict({"state": state, "param_groups": self.optimizer.state_dict()["param_groups"]})
        for group, before in zip(self.optimizer.param_groups, own, strict=True):
            # load_state_dict would replace tensors by copies, but a captured graph may read the tensors.
            group.update({key: value for key, value in before.items() if isinstance(value, Tensor)})
        set_groups(self.optimizer, self._chosen)

    @contextmanager
    def _naming_checkpoint(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise ValueError(f"checkpoint {self.checkpoint}: {error}") from None

    def _make_state(self) -> None:
        # The optimizer may be new: its state is made here, as the checkpoint describes it, and read in `fill`.
        self._state: dict[str, State] = {}
        first: dict[str, str] = {}  # of all parameters that share a stored name
        self._copies: dict[str, str] = {}
        for name in self.held.parameters:
            self._state[name] = {}
            stored_name = self.held.stored_name(name)
            if first.setdefault(stored_name, name) != name:
                self._copies[name] = first[stored_name]
                continue
            for entry, value in self._table.state.get(stored_name, {}).items():
                self._state[name][entry] = value
                if is_large(value):
                    own, whole = self.held.zeros(name, entry, value)
                    self._state[name][entry], self.tensors[f"optimizer.{stored_name}.{entry}"] = own, whole

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
        for name in held.parameters:
            if held.stored_name(name) not in self._table.numbers:
                raise of_another_run(self.checkpoint, f"optimizer.{name}", "none", "a state")
