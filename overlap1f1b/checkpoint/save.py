"""Saving of a training run. :mod:`.load` resumes from it, on any layout of ranks.

    save_checkpoint(engine, "runs/x", step, optimizer)
    saving = save_checkpoint(engine, "runs/x", step, optimizer, background=True)

Ranks exchange the plans of torch.distributed.checkpoint (DCP) over the engine's mesh, not over torch's default group.
So no wait is longer than the engine's limit, and all ranks raise the failure of one rank. In the background a thread
writes copies, over groups of its own.

A parameter that was never updated has no optimizer state, so none is stored. If only some slices of a parameter have
state, the others are stored as zeros, which is the state of rows that never had a gradient.
"""

import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from overlap1f1b.checkpoint.folder import abandon, begin, name_of, publish
from overlap1f1b.checkpoint.optimizer import Optimizers, OptimizerTable, first_difference
from overlap1f1b.checkpoint.shards import Shards, Stored, parts_of
from overlap1f1b.checkpoint.state import States, json_of, key_of, pack, with_random
from overlap1f1b.checkpoint.tensors import FACTS, checksum, encoded
from overlap1f1b.engine.engine import Engine
from overlap1f1b.schedule.values import check_size, checked, quoted
from overlap1f1b.transport import devices
from overlap1f1b.transport.consensus import Together
from overlap1f1b.transport.failures import LostRankError

_THREAD = "checkpoint"  # purpose of the groups over which background threads of all ranks meet


class Saving(Future[Path]):
    """A checkpoint that a thread may still write: a future of its path, as of DCP's ``async_save``.

    >>> saving = save_checkpoint(engine, "runs/x", step, optimizer, background=True)
    >>> engine.step(inputs, target=target)
    >>> saving.result()
    PosixPath('runs/x/step-00000100')

    ``result()`` raises, on every rank, an OSError if a rank cannot write, or a RuntimeError as ``save_checkpoint``. The
    interpreter does not end before the thread has.
    """

    _asked = False

    def begin(self, write: Callable[[], Path]) -> None:
        """Call ``write``, which returns the path, in a thread."""

        def run() -> None:
            try:
                self.set_result(write())
            except BaseException as error:
                self.set_exception(error)

        Thread(target=run, name="overlap1f1b-checkpoint").start()

    def result(self, timeout: float | None = None) -> Path:
        self._asked = True
        return super().result(timeout)

    def settle(self) -> None:
        """Wait; raise the error of the checkpoint if :meth:`result` has not been asked."""
        error = self.exception()
        if error is not None and not self._asked:
            raise error


@checked
def save_checkpoint(
    engine: Engine,
    directory: str | Path,
    step: int,
    optimizer: Optimizers,
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
    checkpoint. Parameters of stages that are given have the numbers of their blocks in the whole model in their names.

    Args:
        engine: Engine of the model.
        directory: Folder that all ranks see.
        step: Number of training steps so far.
        optimizer: Optimizer of the engine's parameters, or several; [] for a checkpoint of the model
            without one. The checkpoint has its state (tensors, numbers, texts, and dicts, lists or tuples of these)
            and, from its parameter groups, every number, text or tuple of these (``lr``, ``weight_decay``, a
            scheduler's entries), but not the way in which a step is computed (``foreach``, ``fused``, ``capturable``,
            ``differentiable``).
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
    check_size("step", step, 0)
    check_size("keep", keep)
    directory = Path(directory)
    failed = f"checkpoint {directory / name_of(step)} cannot be written"
    saving = Saving()
    with engine.guarded("save_checkpoint", (LostRankError, KeyboardInterrupt)):
        engine.wait_for_checkpoint()
        together = Together(engine.mesh, failed)
        facts = together.own(
            lambda: {"step": int(step), "config": json_of(config), "layout": engine.mesh.layout, "model": model}
        )
        tensors = _tensors_to_write(together, engine, optimizer, state, facts)
        folder = together.first(lambda: begin(directory, step))
        planner, writer = _planned(together, folder, tensors)
        if not background:
            saving.set_result(_finish(together, planner, writer, step, keep))
            return saving
        together.each(planner.copy)  # before the next step changes the tensors
        aside = Together(engine.mesh.beside(_THREAD), failed)

    device = engine.connection.device
    gpu = devices.gpu_of(device)

    def write() -> Path:
        if gpu is not None:  # a thread begins on the first GPU, where DCP's streams would take memory
            gpu.set_device(device)
        try:
            return _finish(aside, planner, writer, step, keep)
        except LostRankError as error:
            engine.mesh.failures.explain(error)
            raise

    engine.wait_later(saving.settle)
    saving.begin(write)
    return saving


class _Description(NamedTuple):
    """What the other ranks need to know of a rank before all of them write."""

    same: dict[str, Any]  # which all ranks must have
    slice: int  # number of the rank among those that share the experts
    table: OptimizerTable
    sums: dict[str, int]  # checksum of each of the run's states and of each buffer


def _tensors_to_write(
    together: Together, engine: Engine, optimizer: Optimizers, states: States | None, facts: dict[str, Any]
) -> dict[str, Tensor]:
    """Return the tensors that this rank could write, by name. They share the memory of the run's."""

    parts = together.each(lambda: parts_of(engine))

    def collect() -> tuple[Shards, OptimizerTable, dict[str, Tensor], dict[str, Tensor]]:
        """Return what this rank saves: shards, the optimizer's table, tensors, and the user's states."""
        shards = Shards(engine, optimizer, parts)
        if shards.optimizers and (left := shards.left_out):
            warnings.warn(
                f"none of these optimizers has {left[0]} ({len(left)} such parameters), whose gradient adds up over "
                "steps; allowed: every parameter that has a gradient in an optimizer, experts as "
                "parameter_groups(engine) gives them",
                stacklevel=2,
            )
        table, large = shards.of_optimizer()
        return shards, table, shards.of_model(facts["model"]) | large, pack(with_random(states))

    shards, own, tensors, packed = together.own(collect)
    same = facts | {"state": ", ".join(sorted(packed))}
    buffers = {key: own for key, own in shards.buffers(tensors).items() if not isinstance(tensors[key], DTensor)}
    sums = {key: checksum(content) for key, content in (packed | {key: tensors[key] for key in buffers}).items()}
    every = together.each(lambda: _Description(same, shards.slice[0], own, sums))
    for rank, one in enumerate(every):
        if (key := first_difference(every[0].same, one.same)) is not None:
            here, there = (f"{quoted(every[at].same[key], plain=True)} on {engine.mesh.labels[at]}" for at in (0, rank))
            raise ValueError(f"{together.failed}: {key} is {here} and {there}; allowed: the same on all ranks")
    found = dict[str, dict[int, int]]()  # sums by rank
    for rank, one in enumerate(every):
        for key, value in one.sums.items():
            found.setdefault(key, {})[rank] = value
    differ = {key: min(ranks) for key, ranks in found.items() if len(set(ranks.values())) > 1}  # with its first rank
    shared = {name: name not in differ for name in packed}
    own_buffers = [key for key in differ if key.startswith("model.")]
    for key in buffers.keys() & differ.keys():
        tensors[buffers[key]] = tensors[key] if differ[key] == together.rank else tensors.pop(key)
    tensors |= {key_of(name, None if shared[name] else engine.mesh): content for name, content in packed.items()}
    table = OptimizerTable.merged([one.table for one in every])
    if together.rank == 0:
        tensors[FACTS] = encoded(
            facts | {"states": shared, "buffers": sorted(own_buffers), "optimizer": table._asdict()}
        )
    begun = {(name, one.slice) for one in every for name in one.table.entries}
    for name in shards.sliced & shards.parameters.keys():
        stored_name = shards.stored_names[shards.parameters[name]]
        if shards.holds(name) and (stored_name, shards.slice[0]) not in begun:
            tensors |= shards.zeros(table, name)[1]
    return tensors


class _Planner(DefaultSavePlanner):
    """DCP's planner, which may write copies of the tensors that it has planned."""

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[MetadataIndex, Tensor] = {}

    def copy(self) -> None:
        """Copy the tensors that this rank writes to the CPU."""
        for item in self.plan.items:
            self._copies[item.index] = self.resolve_data(item).detach().to("cpu", copy=True)

    def resolve_data(self, write_item: WriteItem) -> Any:
        copied = self._copies.get(write_item.index)
        return super().resolve_data(write_item) if copied is None else copied


def _planned(together: Together, folder: Path, tensors: dict[str, Tensor]) -> tuple[_Planner, FileSystemWriter]:
    """Divide tensors that several ranks hold; the planner has this rank's plan and, on the first rank, the index."""
    first, planner, writer = together.rank == 0, _Planner(), FileSystemWriter(folder)

    def describe() -> SavePlan:
        planner.set_up_planner(tensors, storage_meta=writer.storage_meta(), is_coordinator=first)
        writer.set_up_storage_writer(first, rank=together.rank, use_collectives=True)
        return writer.prepare_local_plan(planner.create_local_plan())

    plans = together.each(describe)
    # On the first rank the planner keeps the index, which _finish writes.
    every = together.first(lambda: writer.prepare_global_plan(planner.create_global_plan(plans)[0]))
    planner.finish_plan(every[together.rank])
    return planner, writer


def _finish(together: Together, planner: _Planner, writer: FileSystemWriter, step: int, keep: int) -> Path:
    """Write the files of all ranks, and give the checkpoint its name."""
    folder = Path(writer.path)

    def write() -> list[WriteResult]:
        results = writer.write_data(planner.plan, planner)
        results.wait()
        return results.value()

    def publish_all() -> Path:
        writer.finish(planner.metadata, written)
        return publish(folder, step, keep, {result.storage_data.relative_path for one in written for result in one})

    try:
        written = together.each(write, OSError)
    except OSError as error:
        free = together.first(lambda: abandon(folder))
        raise OSError(f"{error} ({free / 2**20:.0f} MiB are free)") from error.__cause__
    return together.first(publish_all)
