"""Tensors of a rank's model and its optimizer, as a checkpoint stores them.

Tensors are stored once, under the names of the whole model: parameters and buffers as ``model.<name>``, optimizer
state as ``optimizer.<parameter>.<entry>``. Pipeline ranks store the blocks that they train. A parameter of Experts is
an equal slice of dimension 0 on each rank that shares the experts, rank 0 first. DCP gets it as a
:class:`.tensors.Whole` of the full shape, and likewise its optimizer state if that has the same rows. FSDP2 shards and
tensor-parallel parameters are DTensors, which DCP knows; a plain slice over "tp" is given to it as one. Everything else
is equal on all ranks that hold it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from overlap1f1b.checkpoint.optimizer import Listed, State, numbers_of, plain
from overlap1f1b.checkpoint.tensors import Index, Whole, zeros_like_rows
from overlap1f1b.cut.blocks import marked_as_slice, tensor_dimension
from overlap1f1b.engine.engine import Engine
from overlap1f1b.moe import Experts
from overlap1f1b.reduce.ties import ties_in
from overlap1f1b.transport.mesh import DIMENSIONS

Stored = Literal["all", "trained", "none"]
"""Tensors of the model that a checkpoint stores."""


class Held:
    """Tensors of the model and the optimizer that this rank holds, with their names in the whole model."""

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
            if (isinstance(module, Experts) and parameter not in engine.connection.sharding.sliced)
            or marked_as_slice(parameter)
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
        """Return ``tensor``, or the whole whose slice on this rank it is. Both share its memory."""
        tensor = tensor.detach()
        if (along := self.tensor_sliced.get(name)) is not None:
            assert self.mesh.devices is not None
            tensor = DTensor.from_local(tensor, self.mesh.devices["tp"], [Shard(along)], run_check=False)
        if name not in self.sliced:
            return tensor
        return Whole.of_slices(tensor, self.slice, self.slices, self.columns.get(name))

    def is_shared(self, name: str) -> bool:
        """Return whether ranks hold different parts of a parameter."""
        return name in self.sliced or name in self.tensor_sliced or isinstance(self.parameters[name], DTensor)

    def has_rows(self, name: str, entry: str, shape: torch.Size, of: torch.Size) -> bool:
        """Return whether ranks hold different parts of a tensor of the optimizer's state, as of its parameter.

        ``shape`` is the tensor's and ``of`` the parameter's, both of this rank's parts or both of the wholes.
        """
        if shape == of or not self.is_shared(name) or shape.numel() <= 1:
            return shape == of and self.is_shared(name)
        other_dimension = name in self.columns or self.tensor_sliced.get(name)  # which is not divided by rows
        if other_dimension or shape[:1] != of[:1]:
            raise ValueError(
                f"the optimizer's {entry} of {name} has shape {list(shape)}; allowed for a part of shape {list(of)} "
                f"that ranks share: {'the same' if other_dimension else f'{of[0]} rows'}, or a single number"
            )
        return True

    def listed(self) -> tuple[Listed, dict[str, Tensor]]:
        """Return this rank's part of the optimizer's table, and the large tensors of the state as they are stored."""
        found, large = Listed(self.slice, {}, []), dict[str, Tensor]()
        for name, parameter in self.parameters.items():
            state: State = (self.optimizer.state.get(parameter) or {}) if self.holds(name) else {}
            for entry, value in state.items():
                if isinstance(value, DTensor) and any(placed.is_partial() for placed in value.placements):
                    raise ValueError(
                        f"the optimizer's {entry} of {name} has placements {value.placements}; allowed: shards or "
                        "copies"
                    )
                own = found.state.setdefault(stored_name := self.stored_name(name), {})
                if not isinstance(value, Tensor) or (
                    value.numel() <= 1 and value.shape != parameter.shape and not isinstance(value, DTensor)
                ):
                    own[entry] = _small(entry, name, value)
                    continue
                rows = self.has_rows(name, entry, value.shape, parameter.shape)
                whole = large[f"optimizer.{stored_name}.{entry}"] = self.whole(value, name) if rows else value.detach()
                own[entry] = torch.empty(whole.shape, dtype=value.dtype, device="meta")
        names = self.stored_names
        for group in self.optimizer.param_groups:
            found.groups.append((numbers_of(group), [names[parameter] for parameter in group["params"]]))
        return found, large

    def zeros(self, name: str, entry: str, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return zeros for this rank's part of a large tensor of a table, and the same as it is stored."""
        parameter = self.parameters[name]
        whole = self.whole(parameter, name).shape
        if not self.has_rows(name, entry, like.shape, whole):
            value = torch.zeros(like.shape, dtype=like.dtype)
            return value, value
        value = zeros_like_rows(parameter, parameter.shape[1:] if like.shape == whole else like.shape[1:], like.dtype)
        return value, self.whole(value, name)


def _small(entry: str, name: str, value: object) -> Any:
    with suppress(TypeError):
        if not isinstance(value, str):  # ``load_state_dict`` takes a text for a list and makes a generator of it
            return plain(value)
    raise ValueError(
        f"the optimizer's {entry} of {name} is of type {type(value).__name__}; allowed: a tensor, a number, or a list "
        "of numbers and texts"
    )
