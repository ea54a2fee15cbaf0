"""Tensors of a rank's model and its optimizer, as a checkpoint stores them.

Tensors are stored once, under the names of the whole model: parameters and buffers as ``model.<name>``, optimizer
state as ``optimizer.<parameter>.<entry>``. Pipeline ranks store the blocks that they train. A parameter of Experts is
an equal slice of dimension 0 on each rank that shares the experts, rank 0 first. DCP gets it as a
:class:`.tensors.Whole` of the full shape, and likewise its optimizer state if that has the same rows. FSDP2 shards and
tensor-parallel parameters are DTensors, which DCP knows; a plain slice over "tp" is given to it as one. A buffer that
differs between the ranks that hold it, such as a running mean, is stored once for other layouts, as the first rank has
it, and for each rank as ``buffer.<name>.<rank>``. Everything else is equal on all ranks that hold it.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, zeros

from overlap1f1b.checkpoint.optimizer import Entries, Optimizers, OptimizerTable, is_large, mapped, small
from overlap1f1b.checkpoint.state import number_of
from overlap1f1b.checkpoint.tensors import Whole, plain_values
from overlap1f1b.cut.blocks import blocks_of, marked_as_slice, tensor_dimension
from overlap1f1b.engine.engine import Engine
from overlap1f1b.moe import ExpertParameter, Experts
from overlap1f1b.moe.parameters import Stack
from overlap1f1b.reduce.ties import ties_in
from overlap1f1b.schedule.values import check_each

Stored = Literal["all", "trained", "none"]
"""Tensors of the model that a checkpoint stores."""


class Part(NamedTuple):
    """What all ranks need to know of a stage that was given, to name parameters as the whole model does."""

    blocks: int  # number of its blocks
    ties: dict[str, str]  # names of its tied parameters among these blocks (``1.weight``) by names that all stages use


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
        stacks: Numbers of this rank's experts in stacked weights whose experts are parameters of their own, by name.
        stored_names: Names under which the optimizer's state of these is stored; copies on other stages share one.
    """

    def __init__(self, engine: Engine, optimizer: Optimizers, parts: Sequence[Mapping[int, Part]]) -> None:
        """Find the tensors and their names; ``parts`` are those of :func:`parts_of` on all ranks."""
        self.optimizers = _optimizers_of(optimizer)
        self.mesh = engine.mesh
        self.model: nn.Module = nn.Module()
        self.elsewhere: set[str] | None = None
        self.columns: dict[str, int] = {}
        ties: dict[nn.Parameter, str] = {}
        model: Any = engine.model
        if not isinstance(model, Mapping):
            self.model = model if isinstance(model, nn.Sequential) else nn.ModuleList(blocks_of(model))
            own = {block for stage in engine.stages.values() for block in stage.blocks}
            self.elsewhere = {name for name, child in self.model._modules.items() if child not in own}
        elif any(parts):
            self.model, self.elsewhere, ties = _numbered(engine, {n: part for own in parts for n, part in own.items()})
        else:
            for stage in model.values():
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
        self.stacks: dict[str, range] = {}
        for parameter in (p for one in self.optimizers for group in one.param_groups for p in group["params"]):
            whole = parameter.stack.weight if isinstance(parameter, ExpertParameter) else parameter
            if whole not in names:
                raise ValueError(
                    f"the optimizer has a parameter of shape {list(parameter.shape)} that this rank's model does "
                    "not have; allowed: an optimizer of the engine's parameters"
                )
            name = names[whole]
            if isinstance(parameter, ExpertParameter):
                self.stacks[name] = numbers = self._experts_of(name, parameter.stack)
                name = f"{name}.{numbers[parameter.place]}"
            if {name, names[whole]} & self.parameters.keys() or (whole is parameter and name in self.stacks):
                raise ValueError(f"{names[whole]} is twice in the optimizers; allowed: once, or once as its experts")
            self.parameters[name] = parameter
        self.stored_names = {p: ties.get(p, name) for name, p in self.parameters.items()}

    def _experts_of(self, name: str, stack: Stack) -> range:
        """Return the numbers, among all ranks' experts, of those that this rank has of a stacked weight."""
        weight, here = stack.weight, len(stack.values())
        first = self.slice[0] * weight.shape[0] if name in self.sliced else 0
        if isinstance(weight, DTensor) and here:
            (chunk,) = weight.__create_chunk_list__()
            first += chunk.offsets[0]
        return range(first, first + here)

    @property
    def left_out(self) -> list[str]:
        """Names of parameters that have a gradient and are in none of the optimizers, as experts of a stack may be."""
        held = {p.stack.weight if isinstance(p, ExpertParameter) else p for p in self.parameters.values()}
        return [
            name
            for name, p in self.model.named_parameters()
            if p.requires_grad and p.grad is not None and p not in held
        ]

    def is_elsewhere(self, key: str) -> bool:
        """Return whether other ranks alone store a tensor, by its name in a checkpoint."""
        _, *path = key.split(".")
        paths = zip(accumulate(path, "{}.{}".format), path[1:], strict=False)
        return not self.holds(path[0]) or any(
            stack in self.stacks and number.isdigit() and int(number) not in self.stacks[stack]
            for stack, number in paths
        )

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
        """Return the optimizers' table, and the large tensors of their state as they are stored, by name."""
        large: dict[str, Tensor] = {}
        leaves = {p: partial(self._split, name, large) for name, p in self.parameters.items() if self.holds(name)}
        return OptimizerTable.of(self.optimizers, self.stored_names, leaves), large

    def _split(self, name: str, large: dict[str, Tensor], value: Any, path: str) -> Any:
        """Return what the table has of a parameter's state; a tensor for DCP is added to ``large``."""
        what, shape = f"the optimizer's {path} of {name}", self.parameters[name].shape
        if not isinstance(value, DTensor) and not (
            isinstance(value, Tensor) and (value.numel() > 1 or value.shape == shape)
        ):
            return small(value, what)
        if isinstance(value, DTensor) and any(placed.is_partial() for placed in value.placements):
            raise ValueError(f"{what} has placements {value.placements}; allowed: shards or copies")
        whole = plain_values(value.detach(), what)
        if self._is_shared(name, path, value.shape, shape):
            whole = self._whole(value, name)
        large[f"optimizer.{self.stored_names[self.parameters[name]]}.{path}"] = whole
        return torch.empty(whole.shape, dtype=value.dtype, device="meta")

    def zeros(self, table: OptimizerTable, name: str) -> tuple[Entries, dict[str, Tensor]]:
        """Return a table's entries of a parameter, with zeros for large ones, and these as they are stored, by name."""
        parameter, stored = self.parameters[name], dict[str, Tensor]()
        stored_name, whole = self.stored_names[parameter], self._whole(parameter, name).shape

        def zero(like: Any, path: str) -> Any:
            """Return zeros like a stored tensor of the optimizer, this rank's part if it is divided."""
            if not is_large(like):
                return like
            if not self._is_shared(name, path, like.shape, whole):
                part = value = torch.zeros(like.shape, dtype=like.dtype)
            else:
                shape = parameter.shape if like.shape == whole else (parameter.shape[0], *like.shape[1:])
                if isinstance(parameter, DTensor):
                    mesh, placements = parameter.device_mesh, parameter.placements
                    part = zeros(*shape, dtype=like.dtype, device_mesh=mesh, placements=placements)
                else:
                    part = parameter.new_zeros(shape, dtype=like.dtype)
                value = self._whole(part, name)
            stored[f"optimizer.{stored_name}.{path}"] = value
            return part

        entries = table.entries.get(stored_name, {})
        return {entry: mapped(like, entry, zero) for entry, like in entries.items()}, stored

    def _whole(self, tensor: Tensor, name: str) -> Tensor:
        """Return ``tensor``, or the whole whose slice on this rank it is. Both share its memory."""
        tensor = plain_values(tensor.detach(), name)
        if (along := self.tensor_sliced.get(name)) is not None:
            assert self.mesh.devices is not None
            tensor = DTensor.from_local(tensor, self.mesh.devices["tp"], [Shard(along)], run_check=False)
        return Whole(tensor, *self.slice, self.columns.get(name)) if name in self.sliced else tensor

    def _is_shared(self, name: str, path: str, shape: torch.Size, of: torch.Size) -> bool:
        """Return whether ranks hold different parts of a tensor of the optimizer's state, as of its parameter.

        ``shape`` is the tensor's and ``of`` the parameter's, both of this rank's parts or both of the wholes.
        """
        sliced = name in self.sliced or name in self.tensor_sliced or isinstance(self.parameters[name], DTensor)
        if not sliced or shape == of or shape.numel() <= 1:
            return sliced and shape == of
        by_row = name not in self.columns and not self.tensor_sliced.get(name) and "." not in path
        if not by_row or shape[:1] != of[:1]:
            raise ValueError(
                f"the optimizer's {path} of {name} has shape {list(shape)}; allowed for a part of shape {list(of)} "
                f"that ranks share: {f'{of[0]} rows' if by_row else 'the same'}, or a single number"
                f"{', or parameter_groups of overlap1f1b.moe' if name in self.sliced else ''}"
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
    modules: Any = engine.model
    model, ties = nn.Module(), dict[nn.Parameter, str]()
    for number, stage in engine.stages.items():
        for position, module in enumerate(stage.blocks, first[number]):
            model.add_module(str(position), module)
        ties |= {p: homes[tie] for tie, p in ties_in(modules[number]).items() if tie in homes}
    every = range(sum(part.blocks for part in parts.values()))
    return model, set(map(str, every)) - model._modules.keys(), ties


def _optimizers_of(optimizers: Any) -> list[torch.optim.Optimizer]:
    """Return one optimizer or several as a list. What has the members of one, as a wrapper, is one."""
    several = [optimizers] if hasattr(optimizers, "param_groups") else optimizers
    if isinstance(several, Iterable) and not isinstance(several, str):
        several = list(several)
        if all(hasattr(one, "param_groups") for one in several):
            return several
    return check_each("optimizer", several, torch.optim.Optimizer)
