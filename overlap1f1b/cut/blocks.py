"""The blocks of a model as users give them: what they may be, have and say."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from overlap1f1b.schedule.values import quoted
from overlap1f1b.transport import devices
from overlap1f1b.transport.mesh import Mesh


class CarriedState(Protocol):
    """State that a forward keeps somewhere: a suspended forward must take it along."""

    def begin(self, seed: int) -> None:
        """Prepare for a new forward, whose random numbers follow from a seed."""

    def leave(self) -> Any:
        """Take off what the running forward has put on, and return it."""

    def enter(self, carried: Any) -> None:
        """Put it on again."""


class MicrobatchBlock(nn.Module):
    """A block whose forward is given its microbatch, too: ``forward(*inputs, microbatch=None)``.

    In ``microbatch.memo`` the blocks of a stage share what they compute once a microbatch, such as masks and rotary
    embeddings, under keys of their own choice. ``microbatch.target`` is the target of the loss. A forward that runs
    without an engine gets ``microbatch=None``.

    Attributes:
        input_names: Names of the inputs of a model's first block, in order. A step then takes a mapping by these
            names, in which None stands for an input that is not given. Any block may return None to pass it on.
        state: State that a suspended forward takes along, beside the places that the engine learns.
        apart: Weights whose gradients the block leaves to ``microbatch.installed.queue`` by itself.
        delays: Whether the block leaves to this queue what adds gradients of other parameters, too.
        whole: Layers whose weight gradients are not computed apart, as their backward runs inside the forward.
        keeps: Whether it keeps its activations, whatever is computed again in other blocks.
    """

    input_names: tuple[str, ...] = ()
    state: CarriedState | None = None
    apart: Collection[nn.Parameter] = ()
    delays: bool = False
    whole: Collection[nn.Module] = ()
    keeps: bool = False


def modules_of(block: nn.Module) -> list[nn.Module]:
    """Return the modules of a block; torch's generators take four times as long, in every step."""
    found, seen = [block], {block}
    for module in found:  # which grows
        new = [child for child in module._modules.values() if child is not None and child not in seen]
        seen.update(new)
        found += new
    return found


def options_of(block: nn.Module) -> MicrobatchBlock | type[MicrobatchBlock]:
    """Return what has a block's attributes: itself, or the class with its defaults for one of another class."""
    return block if isinstance(block, MicrobatchBlock) else MicrobatchBlock


def blocks_of(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """Return the blocks of an ``nn.Sequential``, of a list, or of a module with a list ``blocks``, in order.

    ValueError for no modules, or a forward or hooks of the model's own, which a call of its blocks would leave out.
    """
    if not isinstance(model, nn.Module):
        several = list(model) if isinstance(model, Iterable) and not isinstance(model, str) else [model]
        if strange := [block for block in several if not isinstance(block, nn.Module)]:
            raise ValueError(
                f"{quoted(strange[0])} as a model or a block of it; allowed: an nn.Sequential or a list of blocks"
            )
        return several
    if isinstance(model, nn.ModuleList) and type(model).forward is nn.Module.forward:
        return list(model)
    if isinstance(blocks := model.__dict__.get("blocks"), list):
        return list(blocks)
    if type(model).forward is not nn.Sequential.forward:
        wraps = isinstance(getattr(model, "module", None), nn.Module)
        cure = ", unwrapped: let accelerate or Fabric prepare optimizer and loader alone" if wraps else ""
        raise ValueError(f"a model of type {type(model).__name__}; allowed: an nn.Sequential or a list of blocks{cure}")
    refuse_zero([model], ["the model"])
    if own := own_call(model):
        raise ValueError(
            f"a model of type {type(model).__name__} with {own}; "
            "allowed: hooks on its blocks, list(model) to leave it out, or [model] as one block"
        )
    # Not children(), which leaves out a module's second place.
    return [block for block in model._modules.values() if block is not None]


def blocks_of_stage(stage: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """Return the blocks of a stage that is given: as of a model, or of a module with an ``nn.ModuleList`` ``blocks``.

    Its own forward is not called: ValueError if it has anything that is not in its blocks or tied, or hooks.
    """
    blocks = stage._modules.get("blocks") if isinstance(stage, nn.Module) else None
    if not isinstance(stage, nn.Module) or not isinstance(blocks, nn.ModuleList):
        return blocks_of(stage)
    tied = stage._modules.get("tied")
    inside = {*blocks.modules(), *blocks.parameters(), *blocks.buffers(), *(tied.parameters() if tied else ()), tied}
    members = {**stage._modules, **stage._parameters, **stage._buffers}
    beside = [name for name, member in members.items() if member is not None and member not in inside]
    what = f"{beside[0]} beside its blocks" if beside else own_call(stage)
    if what:
        raise ValueError(
            f"a stage of type {type(stage).__name__} with {what}, which no step would call; "
            "allowed: all of it in its blocks"
        )
    return list(blocks)


def device_of(blocks: Iterable[nn.Module]) -> torch.device | None:
    """Return the device of the first parameter; None without parameters."""
    return next((parameter.device for block in blocks for parameter in block.parameters()), None)


def refuse_wrappers(blocks: Sequence[nn.Module], names: Sequence[str]) -> None:
    """Raise a ValueError for modules that would sum gradients before the engine has added all of them."""
    for block, name in zip(blocks, names, strict=True):
        for module in block.modules():
            if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel | FullyShardedDataParallel):
                kind = type(module).__name__
                raise ValueError(
                    f"{name} holds a {kind}; allowed: its module, and a mesh to sum gradients over ranks or fully_shard"
                )
    refuse_zero(blocks, names)


def refuse_zero(blocks: Sequence[nn.Module], names: Sequence[str]) -> None:
    """Raise a ValueError for parameters of DeepSpeed's ZeRO, whose hooks take gradients of DeepSpeed's own backward."""
    marks = {"ds_id": "stage 3", "param_idx_in_group": "stage 1 or 2"}
    for block, name in zip(blocks, names, strict=True):
        for parameter in block.parameters():
            for mark, stage in marks.items():
                if hasattr(parameter, mark):
                    raise ValueError(
                        f"{name} under DeepSpeed's ZeRO {stage}; allowed: stage 0, or fully_shard in place of ZeRO"
                    )


def refuse_graphs(blocks: Sequence[nn.Module], names: Sequence[str]) -> None:
    """Raise a ValueError for blocks whose kernels torch.compile captures once: a replay overwrites the one before."""
    for block, name in zip(blocks, names, strict=True):
        for module in block.modules():
            compiled: Any = module if hasattr(module, "_orig_mod") else module._compiled_call_impl
            config = None if compiled is None else compiled.get_compiler_config()
            if config and config.get(devices.GRAPHS):
                raise ValueError(
                    f"{name} is compiled with {devices.GRAPHS}, as by mode='reduce-overhead', and several microbatches "
                    "are alive; allowed: another mode of torch.compile, or a program with one (sequential)"
                )


def marked_as_slice(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is marked as an expert's, of which each rank along "ep" has others."""
    return getattr(parameter, "allreduce", True) is False and not isinstance(parameter, DTensor)


def tensor_dimension(parameter: nn.Parameter, mesh: Mesh, *, expert: bool) -> int | None:
    """Return the dimension along which a plain parameter is marked as a slice over "tp"; None for a copy.

    The marks are Megatron-Core's, ``tensor_model_parallel`` and ``partition_dim``; ValueError if this is no dimension.
    Experts that a tensor group shares are no slices of each other.
    """
    marked = getattr(parameter, "tensor_model_parallel", False) is True and not isinstance(parameter, DTensor)
    if not marked or mesh.group("tp") is None or (expert and "tp" in mesh.experts_over):
        return None
    along = getattr(parameter, "partition_dim", None)
    if type(along) is not int or not 0 <= along < parameter.ndim:
        raise ValueError(
            f"partition_dim={quoted(along)} of a parameter {list(parameter.shape)} with tensor_model_parallel = True; "
            f"allowed: the dimension of its slices over 'tp', 0 to {parameter.ndim - 1}"
        )
    return along


def own_call(module: nn.Module) -> str | None:
    """Return the name of something that a module's call does beside the forward of its class, hooks of FSDP2 apart."""
    if "forward" in vars(module):
        return "a forward of its own"
    for kind in ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks"):
        hooks = getattr(module, f"_{kind}").values()
        if any(not hook.__module__.startswith("torch.distributed.fsdp.") for hook in hooks):
            return f"{kind} of its own".replace("_", " ")
    return None


def is_compiled(block: nn.Module) -> bool:
    """Return whether anything of a block is under ``torch.compile``."""
    return any(getattr(m, "_compiled_call_impl", None) is not None or hasattr(m, "_orig_mod") for m in block.modules())
