"""Tensors of a rank's model and its optimizer, as a checkpoint stores them.

Tensors are stored once, under the names of the whole model: parameters and buffers as ``model.<name>``, optimizer
state as ``optimizer.<parameter>.<entry>``. Pipeline ranks store the blocks that they train. A parameter of Experts is
an equal slice of dimension 0 on each rank that shares the experts, rank 0 first. DCP gets it as a
:class:`.tensors.Whole` of the full shape, and likewise its optimizer state if that has the same rows. FSDP2 shards and
tensor-parallel parameters are DTensors, which DCP knows; a plain slice over "tp" is given to it as one. A buffer that
differs between the ranks that hold it, such as a running mean, is stored once for other layouts, as the first rank has
it, and for each rank as ``buffer.<name>.<rank>``. Everything else is equal on all ranks that hold it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, zeros

from overlap1f1b.checkpoint.optimizer import Entries, OptimizerTable, class_of, is_large, numbers_of, plain
from overlap1f1b.checkpoint.state import number_of
from overlap1f1b.checkpoint.tensors import Whole, plain_values
from overlap1f1b.cut.blocks import blocks_of, marked_as_slice, tensor_dimension
from overlap1f1b.engine.engine import Engine
from overlap1f1b.moe import Experts
from overlap1f1b.reduce.ties import ties_in

Stored = Literal["all", "trained", "none"]
"""Tensors of the model that a checkpoint stores."""


class Part(NamedTuple):
    """What all ranks need to know of a stage that was given, to name parameters as the whole model does.

    Args:
        blocks: Number of its blocks.
        ties: Names of its tied parameters among these blocks, such as ``1.weight``, by the names that all stages use.
    """

    blocks: int
    ties: dict[str, str]


def parts_of(engine: Engine) -> dict[int, Part]:
    """Return the stages that were given to this rank, by their numbers, but those that know the model's names."""
    parts = {}
    for number, stage in engine.model.items() if isinstance(engine.model, Mapping) else ():
        if not hasattr(stage, "hang"):
            blocks = engine.stages[number].blocks
            names = {p: name for name, p in nn.ModuleList(blocks).named_parameters()}
            ties = {name: names[p] for name, p in ties_in(stage).items() if p in names}
            parts[number] = Part(len(blocks), ties)
    return parts


class Shards:
    """Tensors of the model and the optimizer that this rank holds, with their names in the whole model.

    Attributes:
        model: The engine's model, or a module of the blocks that this rank was given, by their numbers in the model.
        elsewhere: Names of the model's blocks that other ranks store; None if this rank does not know them.
        slice: Number of this rank among those that share the experts, and how many these are.
        sliced: Names of parameters that these ranks slice, without a DTensor that says so.
        columns: Number of this rank's experts in parameters whose columns, in equal parts, are sorted by expert.
        tensor_sliced: Dimension of plain parameters of which each rank of a tensor group has a slice.
        parameters: Parameters that the optimizer updates, by name, in the optimizer's order.
        stored_names: Names under which the optimizer's state of these is stored; copies on other stages share one.
    """

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer, parts: Sequence[Mapping[int, Part]]) -> None:
        """Find the tensors and their names; ``parts`` are those of :func:`parts_of` on all ranks."""
        self.optimizer, self.mesh = optimizer, engine.mesh
        self.model: nn.Module = nn.Module()
        self.elsewhere: set[str] | None = None
        self.columns: dict[str, int] = {}
        ties: dict[nn.Parameter, str] = {}
        given: Any = engine.model
        if not isinstance(given, Mapping):
            self.model = given if isinstance(given, nn.Sequential) else nn.ModuleList(blocks_of(given))
            own = {block for stage in engine.stages.values() for block in stage.blocks}
            self.elsewhere = {name for name, child in self.model._modules.items() if child not in own}
        elif any(parts):
            self.model, self.elsewhere, ties = _numbered(engine, {n: part for own in parts for n, part in own.items()})
        else:
            for stage in given.values():
                stage.hang(self.model)
                ties |= {p: name for name, p in ties_in(stage).items()}
                self.columns |= stage.columns
        self.slice = self.mesh.expert_slice
        self.sliced = {
            f"{path}.{label}".lstrip(".")
            for path, module in self.model.named_modules(remove_duplicate=False)
            if self.slice[1] > 1
            for label, parameter in module.named_parameters(recurse=isinstance(module, Experts), remove_duplicate=False)
            if (isinstance(module, Experts) and parameter not in engine.connection.sharding.sliced)
            or marked_as_slice(parameter)
        }
        self.tensor_sliced: dict[str, int] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if (along := tensor_dimension(parameter, self.mesh, expert=name in self.sliced)) is not None:
                if (stride := getattr(parameter, "partition_stride", 1)) != 1:
                    raise ValueError(f"partition_stride={stride!r} of {name} in a checkpoint; allowed: 1")
                self.tensor_sliced[name] = along
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        self.parameters: dict[str, nn.Parameter] = {}
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter not in names:
                raise ValueError(
                    f"the optimizer has a parameter of shape {list(parameter.shape)} that this rank's model does "
                    "not have; allowed: an optimizer of the engine's parameters"
                )
            self.parameters[names[parameter]] = parameter
        self.stored_names = {p: ties.get(p, name) for name, p in self.parameters.items()}

    def holds(self, name: str) -> bool:
        """Return whether this rank stores a tensor of the model."""
        return not self.elsewhere or name.partition(".")[0] not in self.elsewhere

    def of_model(self, stored: Stored) -> dict[str, Tensor]:
        """Return the model's tensors as they are stored, by name."""
        if stored == "none":
            return {}
        state, frozen = self.model.state_dict(), set[str]()
        if renamed := sorted((self.sliced | self.tensor_sliced.keys()) - state.keys()):
            raise ValueError(
                f"the model's state_dict has no {renamed[0]}, of which ranks have slices; allowed: a state_dict with "
                "the parameters' names"
            )
        for name, value in state.items():
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"{name} of the model's state_dict is of type {type(value).__name__}; allowed: a tensor"
                )
        if stored == "trained":
            frozen = {name for name, p in self.model.named_parameters(remove_duplicate=False) if not p.requires_grad}
        names = [name for name in state if self.holds(name) and name not in frozen]
        return {f"model.{name}": self._whole(state[name], name) for name in names}

    def buffers(self, stored: Iterable[str]) -> dict[str, str]:
        """Return names under which this rank stores buffers of its own, by those of all ranks, among these names.

        Extra states of modules count as buffers.
        """
        parameters = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        names = (name for key in stored if (name := key.removeprefix("model.")) != key and name not in parameters)
        return {f"model.{name}": f"buffer.{name}.{number_of(self.mesh)}" for name in names}

    def of_optimizer(self) -> tuple[OptimizerTable, dict[str, Tensor]]:
        """Return the optimizer's table, and the large tensors of its state as they are stored, by name."""
        every, large = dict[str, Entries](), dict[str, Tensor]()
        for name, parameter in self.parameters.items():
            state = (self.optimizer.state.get(parameter) or {}) if self.holds(name) else {}
            for entry, value in state.items():
                what, stored_name = f"the optimizer's {entry} of {name}", self.stored_names[parameter]
                own = every.setdefault(stored_name, {})
                is_tensor = isinstance(value, DTensor) or (
                    isinstance(value, Tensor) and (value.numel() > 1 or value.shape == parameter.shape)
                )
                if not is_tensor:
                    own[entry] = _small(value, what)
                    continue
                if isinstance(value, DTensor) and any(placed.is_partial() for placed in value.placements):
                    raise ValueError(f"{what} has placements {value.placements}; allowed: shards or copies")
                whole = plain_values(value.detach(), what)
                if self._is_shared(name, what, value.shape, parameter.shape):
                    whole = self._whole(value, name)
                large[f"optimizer.{stored_name}.{entry}"] = whole
                own[entry] = torch.empty(whole.shape, dtype=value.dtype, device="meta")
        groups = [numbers_of(group) for group in self.optimizer.param_groups]
        pairs = zip(groups, self.optimizer.param_groups, strict=True)
        numbers = {self.stored_names[p]: own for own, group in pairs for p in group["params"]}
        return OptimizerTable(every, numbers, groups, dict.fromkeys(numbers, class_of(self.optimizer))), large

    def zeros(self, table: OptimizerTable, name: str) -> tuple[Entries, dict[str, Tensor]]:
        """Return a table's entries of a parameter, with zeros for large ones, and these as they are stored, by name."""
        parameter, stored = self.parameters[name], dict[str, Tensor]()
        entries = dict(table.entries.get(self.stored_names[parameter], {}))
        for entry, like in entries.items():
            if not is_large(like):
                continue
            whole = self._whole(parameter, name).shape
            if not self._is_shared(name, f"the optimizer's {entry} of {name}", like.shape, whole):
                part = value = torch.zeros(like.shape, dtype=like.dtype)
            else:
                shape = parameter.shape if like.shape == whole else (parameter.shape[0], *like.shape[1:])
                if isinstance(parameter, DTensor):
                    mesh, placements = parameter.device_mesh, parameter.placements
                    part = zeros(*shape, dtype=like.dtype, device_mesh=mesh, placements=placements)
                else:
                    part = parameter.new_zeros(shape, dtype=like.dtype)
                value = self._whole(part, name)
            entries[entry], stored[f"optimizer.{self.stored_names[parameter]}.{entry}"] = part, value
        return entries, stored

    def _whole(self, tensor: Tensor, name: str) -> Tensor:
        """Return ``tensor``, or the whole whose slice on this rank it is. Both share its memory."""
        tensor = plain_values(tensor.detach(), name)
        if (along := self.tensor_sliced.get(name)) is not None:
            assert self.mesh.devices is not None
            tensor = DTensor.from_local(tensor, self.mesh.devices["tp"], [Shard(along)], run_check=False)
        return Whole(tensor, *self.slice, self.columns.get(name)) if name in self.sliced else tensor

    def _is_shared(self, name: str, what: str, shape: torch.Size, of: torch.Size) -> bool:
        """Return whether ranks hold different parts of a tensor of the optimizer's state, as of its parameter.

        ``shape`` is the tensor's and ``of`` the parameter's, both of this rank's parts or both of the wholes.
        """
        sliced = name in self.sliced or name in self.tensor_sliced or isinstance(self.parameters[name], DTensor)
        if not sliced or shape == of or shape.numel() <= 1:
            return sliced and shape == of
        by_row = name not in self.columns and not self.tensor_sliced.get(name)
        if not by_row or shape[:1] != of[:1]:
            raise ValueError(
                f"{what} has shape {list(shape)}; allowed for a part of shape {list(of)} that ranks share: "
                f"{f'{of[0]} rows' if by_row else 'the same'}, or a single number"
            )
        return True


def _numbered(engine: Engine, parts: Mapping[int, Part]) -> tuple[nn.Module, set[str], dict[nn.Parameter, str]]:
    """Return a module of the blocks in this rank's stages, by their numbers in the whole model.

    Also return the numbers of all other blocks, and of each tied parameter its name in the first stage that has it.
    """
    numbers = sorted(parts)
    first = dict(zip(numbers, accumulate((parts[n].blocks for n in numbers), initial=0), strict=False))
    homes: dict[str, str] = {}
    for number in numbers:
        for tie, name in parts[number].ties.items():
            block, _, label = name.partition(".")
            homes.setdefault(tie, f"{first[number] + int(block)}.{label}")
    given: Any = engine.model
    model, ties = nn.Module(), dict[nn.Parameter, str]()
    for number, stage in engine.stages.items():
        for position, module in enumerate(stage.blocks, first[number]):
            model.add_module(str(position), module)
        ties |= {p: homes[tie] for tie, p in ties_in(given[number]).items() if tie in homes}
    every = range(sum(part.blocks for part in parts.values()))
    return model, set(map(str, every)) - model._modules.keys(), ties


def _small(value: object, what: str) -> Any:
    with suppress(TypeError):
        if not isinstance(value, str):  # ``load_state_dict`` takes a text for a list and makes a generator of it
            return plain(value)
    kind = type(value).__name__
    raise ValueError(f"{what} is of type {kind}; allowed: a tensor, a number, or a list of numbers and texts")
