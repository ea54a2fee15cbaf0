"""Tensors of a rank's model and its optimizer, as a checkpoint stores them.

Tensors are stored once, under the names of the whole model: parameters and buffers as ``model.<name>``, optimizer
state as ``optimizer.<parameter>.<entry>``. Pipeline ranks store the blocks that they train. A parameter of Experts is
an equal slice of dimension 0 on each rank that shares the experts, rank 0 first. DCP gets it as a
:class:`.tensors.Slice` of the full shape, and likewise its optimizer state if that has the same rows. FSDP2 shards and
tensor-parallel parameters are DTensors, which DCP knows; a plain slice over "tp" is given to it as one. Everything else
is equal on all ranks that hold it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from overlap1f1b.engine.checkpoint.tensors import Index, Slice
from overlap1f1b.engine.engine import Engine
from overlap1f1b.engine.reduce.tied import ties_in
from overlap1f1b.engine.run.model import marked_as_slice, tensor_dimension
from overlap1f1b.moe import Experts
from overlap1f1b.transport.boundary import is_partial
from overlap1f1b.transport.mesh import DIMENSIONS

State = dict[str, Any]
Stored = Literal["all", "trained", "none"]
"""Tensors of the model that a checkpoint stores."""


class Held:
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
        self.tensor_sliced: dict[str, int] = {}
        """Dimension of plain parameters of which each rank of a tensor group has a slice."""
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if (along := tensor_dimension(parameter, self.mesh, expert=name in self.sliced)) is not None:
                if (stride := getattr(parameter, "partition_stride", 1)) != 1:
                    raise ValueError(f"partition_stride={stride!r} of {name} in a checkpoint; allowed: 1")
                self.tensor_sliced[name] = along
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
        renamed = sorted((self.sliced | self.tensor_sliced.keys()) - state.keys())
        if renamed:
            raise ValueError(
                f"the model's state_dict has no {renamed[0]}, of which ranks have slices; allowed: a state_dict with "
                "the parameters' names"
            )
        for name, value in state.items():
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"{name} of the model's state_dict is of type {type(value).__name__}; allowed: a tensor"
                )
        frozen = {name for name, p in self.model.named_parameters(remove_duplicate=False) if not p.requires_grad}
        left = frozen if stored == "trained" else set()
        return {
            f"model.{name}": self.whole(tensor, name)
            for name, tensor in state.items()
            if self.holds(name) and name not in left
        }

    def make_extra_states(self, tensors: dict[str, Tensor], stored: Index) -> None:
        """Replace the extra states among tensors by new tensors as they are stored, since a module may take any."""
        for name in tensors.keys() & stored.keys():
            if name.endswith("._extra_state"):
                meta = stored[name]
                tensors[name] = torch.empty(meta.size, dtype=meta.properties.dtype, device=tensors[name].device)

    def set_extra_states(self, tensors: Mapping[str, Tensor]) -> None:
        """Give modules the extra states among stored tensors; all other tensors are the model's own memory."""
        for path, module in self.model.named_modules(remove_duplicate=False):
            value = tensors.get(f"model.{path}._extra_state")
            if value is not None:
                module.set_extra_state(value)

    @property
    def number(self) -> int:
        """This rank's number in the order of the mesh's dimensions."""
        number = 0
        for name in DIMENSIONS:
            number = number * self.mesh.size(name) + self.mesh.rank(name)
        return number

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
        if (along := self.tensor_sliced.get(name)) is not None:
            assert self.mesh.devices is not None
            tensor = DTensor.from_local(tensor, self.mesh.devices["tp"], [Shard(along)], run_check=False)
        if name not in self.sliced:
            return tensor
        return Slice(tensor, self.slice, self.slices)

    def is_shared(self, name: str) -> bool:
        """Return whether ranks hold different parts of a parameter."""
        return name in self.sliced or name in self.tensor_sliced or isinstance(self.parameters[name], DTensor)

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
        rows = (
            value.shape == parameter.shape
            or (
                name not in self.columns
                and not self.tensor_sliced.get(name)  # other dimensions are not divided by rows
                and value.numel() > 1
                and value.shape[:1] == parameter.shape[:1]
            )
        )
        if self.is_shared(name) and value.numel() > 1 and not rows:
            allowed = "the same" if self.tensor_sliced.get(name) else f"{parameter.shape[0]} rows"
            raise ValueError(
                f"the optimizer's {entry} of {name} has shape {list(value.shape)}; allowed for a part of shape "
                f"{list(parameter.shape)} that ranks share: {allowed}, or a single number"
            )
        return rows and (self.is_shared(name) or name in self.columns)
