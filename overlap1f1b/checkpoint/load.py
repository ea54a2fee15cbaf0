"""Resuming of a training run from a checkpoint, on any layout of ranks.

    step = load_checkpoint(engine, "runs/x", optimizer)  # 0 if there is none

DCP keeps its index as a pickle: load only checkpoints from people you trust.
"""

import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Any

from torch import nn

from overlap1f1b.checkpoint.folder import checkpoint_in
from overlap1f1b.checkpoint.optimizer import Entries, Optimizers, OptimizerTable, fill, first_difference
from overlap1f1b.checkpoint.shards import Shards, parts_of
from overlap1f1b.checkpoint.state import States, described, json_of, keys_of, unpack, with_random
from overlap1f1b.checkpoint.tensors import FACTS, check_tensors, decoded, empty, read_index, read_tensors
from overlap1f1b.engine.engine import Engine
from overlap1f1b.schedule.values import checked, quoted
from overlap1f1b.transport.consensus import Together
from overlap1f1b.transport.failures import LostRankError


@checked
def load_checkpoint(
    engine: Engine,
    directory: str | Path,
    optimizer: Optimizers,
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
        optimizer: Optimizer of the engine's parameters, possibly a new one, or several in any order. Each group gets
            the learning rate and the other numbers that its parameters were saved with, on any rank.
        state: Objects for every ``state`` of :func:`save_checkpoint`; their ``load_state_dict`` is called last. None in
            place of an object leaves a state out; ``{"random": None}`` leaves random numbers as they are.
        config: The ``config`` of :func:`save_checkpoint`.

    Raises:
        ValueError: The checkpoint has another configuration, model or other states (the message has the first
            difference), its optimizer had another class or other parameter groups, it is damaged, or the mesh does not
            have all ranks.
        RuntimeError: A rank failed in another way, or did not answer, as for :func:`save_checkpoint`.
    """
    with engine.guarded("load_checkpoint", (LostRankError, KeyboardInterrupt)):
        engine.wait_for_checkpoint()
        together = Together(engine.mesh, f"{directory} cannot be searched")
        checkpoint = together.first(lambda: checkpoint_in(Path(directory)))
        if checkpoint is None:
            return 0
        together = Together(engine.mesh, f"checkpoint {checkpoint} cannot be loaded")
        together.each(lambda: check_tensors(checkpoint, together.rank, together.size))
        facts = together.first(lambda: _facts(checkpoint, config))
        parts = together.each(lambda: parts_of(engine))
        fill = together.own(lambda: _prepared(Shards(engine, optimizer, parts), checkpoint, facts, with_random(state)))
        names = sorted(chain.from_iterable(together.each(fill)))
        if names and together.rank == 0:
            warnings.warn(
                f"checkpoint {checkpoint} has {names[0]} of each rank of {described(facts['layout'])}; this run, over "
                f"{described(engine.mesh.layout)}, takes the first rank's for all",
                stacklevel=2,
            )
        return facts["step"]


def _facts(checkpoint: Path, config: Mapping[str, Any] | None) -> dict[str, Any]:
    index = read_index(checkpoint)
    if FACTS not in index:
        raise ValueError(f"checkpoint {checkpoint} has no {FACTS!r}; allowed: one of save_checkpoint, of this version")
    read_tensors(checkpoint, packed := {FACTS: empty(index[FACTS])})
    facts = decoded(packed[FACTS])
    _compare(checkpoint, facts["config"], json_of(config))
    return facts


def _prepared(shards: Shards, checkpoint: Path, facts: Mapping[str, Any], states: States) -> Callable[[], list[str]]:
    """Compare a checkpoint with this rank's part of the run, and change nothing; return the function that fills it.

    This function returns the names of buffers that it has taken from another rank.
    """
    # 1. What this rank reads: its own buffers, where ranks have others.
    index = dict(read_index(checkpoint))
    differ = shards.buffers(facts["buffers"])
    same = shards.mesh.layout == facts["layout"]
    own = {key: name for key, name in differ.items() if same and name in index}
    index |= {key: index[name] for key, name in own.items()}
    table = OptimizerTable(**facts["optimizer"])
    tensors, entries = shards.of_model(facts["model"]), dict[str, Entries]()
    for key in tensors.keys() & index.keys():
        if key.endswith("._extra_state"):  # which a module may take in any shape
            tensors[key] = empty(index[key], tensors[key].device)
    try:
        numbers = table.chosen(shards.optimizers, shards.stored_names)
        for name, stored_name in zip(shards.parameters, shards.stored_names.values(), strict=True):
            if stored_name not in entries:
                entries[stored_name], large = shards.zeros(table, name)
                tensors |= large
        keys = keys_of(states, facts["states"], shards.mesh, facts["layout"])
    except ValueError as error:
        raise ValueError(f"checkpoint {checkpoint}: {error}") from None
    # 2. Whether it fits. Beside this rank's there are those of other blocks, and of stages that it was not given.
    is_whole = shards.elsewhere is not None
    there = {
        key: f"{meta.properties.dtype}{list(meta.size)}"
        for key, meta in index.items()
        if key in tensors or (is_whole and key.startswith(("model.", "optimizer.")) and not shards.is_elsewhere(key))
    }
    here = {key: f"{tensor.dtype}{list(tensor.shape)}" for key, tensor in tensors.items()}
    _compare(checkpoint, there, here)
    # A parameter that was in the optimizer but never updated has no state; one outside of it is a difference.
    if any(entries.values()):
        _compare(checkpoint, {}, {f"optimizer.{name}": "a state" for name in entries if name not in table.numbers})
    tensors |= {key: empty(index[key]) for key in keys.values()}

    def fill_all() -> list[str]:
        """Read the tensors, fill model, optimizers and states; return the names whose dtypes differ."""
        read_tensors(checkpoint, {own.get(key, key): tensor for key, tensor in tensors.items()})
        for key, tensor in tensors.items():
            path, _, last = key.removeprefix("model.").rpartition(".")
            if last == "_extra_state":
                shards.model.get_submodule(path).set_extra_state(tensor)
        state, filled = dict[nn.Parameter, Entries](), set[str]()
        for parameter, name in shards.stored_names.items():
            state[parameter] = deepcopy(entries[name]) if name in filled else entries[name]  # of a copy on a stage
            filled.add(name)
        fill(shards.optimizers, state, numbers, table.beside)
        unpack(states, {name: tensors[key] for name, key in keys.items()})
        return [key.removeprefix("model.") for key in differ.keys() & tensors.keys() - own.keys()]

    return fill_all


def _compare(checkpoint: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    if (key := first_difference(here, there)) is not None:
        stored, own = (quoted(one[key], plain=True) if key in one else "none" for one in (there, here))
        key = quoted(key, plain=True)
        raise ValueError(
            f"checkpoint {checkpoint} has {key}={stored}, this run has {key}={own}; "
            "use the same settings or another checkpoint folder"
        )
