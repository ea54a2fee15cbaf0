"""Parameters that torch's FSDP2 holds, while the engine plays the modules that use them.

``fully_shard`` and ``replicate`` gather a module's parameters in its forward and reduce their gradients in its
backward, by hooks that expect one microbatch at a time, backward after forward. The engine keeps several open in each
module, and cuts their backwards into parts. So while it plays, the parameters stay gathered and the hooks do no more
than cast for mixed precision; :class:`ShardedReducer` has the gradients reduced once they are complete.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor

from overlap1f1b.moe.groups import abort

ParameterGroup = Any  # torch's FSDPParamGroup, which is not public
_PASSIVE_CASTS = (2, 13)  # from this torch on, FSDP2's hooks cast in the state that the engine keeps them in


class Sharding:
    """What FSDP2 holds of one or more models; nothing, where it was not applied.

    >>> sharding = Sharding(model, ranks=range(size))
    >>> with sharding.gathered():
    ...     stage = Stage(model, exchange)  # sees whole parameters, the same objects in every step

    Parameters stay gathered from the first node of a step to the last, whatever ``reshard_after_forward`` says.

    Args:
        models: Each an ``nn.Sequential`` or a list of blocks, as for :class:`Stage`, in the same order
            on all ranks that hold them.
        ranks: Those of the engine, by their numbers in the default group.

    Raises:
        ValueError: A parameter is a DTensor by something else, such as tensor parallelism, or over other ranks; FSDP2
            was applied to a module around the blocks, which is not given; or it was applied with mixed precision, and
            torch is older than 2.13.
    """

    def __init__(self, *models: nn.Module | Sequence[nn.Module], ranks: Collection[int]) -> None:
        tops = [m for model in models for m in ([model] if isinstance(model, nn.Module) else model)]
        roots = [root for top in tops for root in _outermost(top)]
        self._roots = _by_state(roots)
        self._modules = _by_state(module for root in roots for module in _held(root))
        self._uncalled = {id(model) for model in models}
        self.groups: list[ParameterGroup] = [group for m in self._modules for group in _groups(m)]
        self._handles: list[Any] = []
        for root in self._roots:
            _state(root)._lazy_init()
        self._check(tops, ranks)

    def _check(self, tops: Sequence[nn.Module], ranks: Collection[int]) -> None:
        held = {id(p.sharded_param): group for group in self.groups for p in group.fsdp_params}
        for top in tops:
            for path, module in top.named_modules():
                for label, parameter in module.named_parameters(recurse=False):
                    if isinstance(parameter, DTensor):
                        name = f"parameter {f'{path}.{label}'.lstrip('.')} of {type(top).__name__}"
                        _check_parameter(parameter.device_mesh, held.get(id(parameter)), module, ranks, name)
        version = tuple(int(part) for part in torch.__version__.split(".")[:2])
        for group in self.groups:
            if group.mp_policy.param_dtype is not None and version < _PASSIVE_CASTS:
                raise ValueError(f"FSDP2 with param_dtype on torch {torch.__version__}; allowed: torch 2.13 or newer")

    @property
    def process_groups(self) -> set[dist.ProcessGroup]:
        """What FSDP2's collectives run on: groups of the user's."""
        meshes = [group.mesh_info for group in self.groups]
        found = (getattr(mesh, f"{kind}_process_group", None) for mesh in meshes for kind in ("shard", "replicate"))
        return {group for group in found if group is not None}

    def limit(self, timeout: timedelta) -> None:
        """Sets the limit of FSDP2's waits, which torch takes from the process group."""
        for group in self.process_groups:
            dist.distributed_c10d._set_pg_timeout(timeout, group)

    def abort(self) -> None:
        """Ends FSDP2's collectives on gloo, where the process ends: its groups are the user's."""
        for group in self.process_groups:
            abort(group)

    def gather(self) -> None:
        """Starts to gather all parameters, in order; a module's forward waits for its own. Holds the hooks still."""
        self._handles = [module.unshard(async_op=True) for module in self._modules]
        for module in self._modules:
            # Else a forward would have the parameters resharded under another that is suspended, and a backward would
            # end with the reduction of whatever is there.
            _state(module)._training_state = TrainingState.PRE_BACKWARD
        for module, handle in zip(self._modules, self._handles, strict=True):
            if id(module) in self._uncalled:  # the engine calls its blocks alone
                handle.wait()

    def wait(self) -> None:
        """Waits until all parameters are here."""
        for handle in self._handles:
            handle.wait()

    def release(self) -> None:
        """Frees the gathered parameters; the modules are FSDP2's again."""
        self.wait()  # an unfinished gathering would pass for the next one
        self._handles = []
        for module in self._modules:
            module.reshard()
            _state(module)._training_state = TrainingState.IDLE

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """While it lasts, all parameters are whole."""
        self.gather()
        try:
            self.wait()
            yield
        finally:
            self.release()

    def finalize(self) -> None:
        """Ends FSDP2's backward: on CUDA, the current stream waits for the reductions."""
        for root in self._roots:
            _state(root)._root_post_backward_final_callback()

    def forget(self) -> None:
        """Drops gradients that were not reduced."""
        for group in self.groups:
            for held in group.fsdp_params:
                held.unsharded_accumulated_grad = None
                if hasattr(held, "_unsharded_param"):
                    held._unsharded_param.grad = None


def _check_parameter(
    mesh: DeviceMesh, group: ParameterGroup | None, module: nn.Module, ranks: Collection[int], name: str
) -> None:
    """Refuses a DTensor of a module's over this mesh, unless a group of FSDP2 holds it over the engine's ranks."""
    # Ranks beside these are an engine of their own: they would measure other costs and play another plan.
    foreign = _beyond(mesh, ranks)
    if not foreign and group is not None:  # FSDP2 may hold tensors that are sharded over another dimension already
        foreign = _beyond(mesh, group.mesh_info.mesh.mesh.flatten().tolist())
        if not foreign:
            return
    elif not foreign and getattr(module, "_is_fsdp_managed_module", False):
        raise ValueError(
            f"{name} is sharded by a module around the blocks; "
            "allowed: that module itself given as the model, or as a stage; or fully_shard on each block"
        )
    raise ValueError(
        f"{name} is a DTensor over {foreign or _beyond(mesh, ())}, which is not FSDP2's over the engine's ranks "
        f"{sorted(ranks)}; allowed: FSDP2 over those, or whole tensors (no tensor parallelism)"
    )


def _beyond(mesh: DeviceMesh, ranks: Collection[int]) -> str:
    """The dimensions of a mesh along which this rank meets others than these, in words; empty where there is none."""
    at, found = mesh.get_coordinate() or [0] * mesh.ndim, []
    for dimension in range(mesh.ndim):
        line = mesh.mesh[tuple(slice(None) if d == dimension else at[d] for d in range(mesh.ndim))].tolist()
        if not set(line) <= set(ranks):
            names = mesh.mesh_dim_names
            found.append(f"{repr(names[dimension]) if names else f'dimension {dimension}'} of ranks {line}")
    return ", ".join(found)


def _state(module: FSDPModule) -> Any:
    return module._get_fsdp_state()


def _groups(module: FSDPModule) -> list[ParameterGroup]:
    state = _state(module)
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    # torch 2.11 knows one a module, or none.
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _by_state(modules: Iterable[FSDPModule]) -> list[FSDPModule]:
    """The modules but for those that share their state with an earlier one, as of ``fully_shard([a, b])``."""
    first: dict[int, FSDPModule] = {}
    for module in modules:
        first.setdefault(id(_state(module)), module)
    return list(first.values())


def _outermost(module: nn.Module) -> Iterator[FSDPModule]:
    if isinstance(module, FSDPModule):
        yield module
    else:
        for child in module.children():
            yield from _outermost(child)


def _held(root: FSDPModule) -> list[FSDPModule]:
    assert isinstance(root, nn.Module)
    return [module for module in root.modules() if isinstance(module, FSDPModule)]
