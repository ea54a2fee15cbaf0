"""Facts that must be equal on ranks that train together, for :meth:`Mesh.agree`.

Ranks that differ in an option would wait for each other for ever, or go on with wrong gradients.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from overlap1f1b.engine.run.blocks import Blocks
from overlap1f1b.schedule import Program
from overlap1f1b.transport.mesh import Mesh

Facts = dict[str, object]
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def options(program: Program, **others: object) -> Facts:
    """Return the options of an engine."""
    order = hashlib.sha256(program.draw().encode()).hexdigest()[:8]
    text = f"{program.name} of {program.microbatches} microbatches over {program.placement.ranks} ranks, order {order}"
    if program.search_seconds:
        text += f", search of {program.search_seconds:g} s within {program.peak_activations}"
    return {"program": text, **others}


def structure(stages: Mapping[int, Blocks]) -> Facts:
    """Return the blocks of the stages, and shapes and dtypes of their parameters and whether they are trained."""
    facts: Facts = {
        place: f"{str(p.dtype)[6:]}{list(p.shape)}{'' if p.requires_grad else ' frozen'}"
        for place, p, _ in parameters_by_place(stages)
    }
    for number, stage in stages.items():
        facts[f"the number of blocks of stage {number}"] = len(stage.blocks)
        for name, shape in zip(stage.names, stage.shape, strict=True):
            facts[f"the number of experts' calls in {name} of stage {number}"] = shape.seams
            facts[f"whether {name} of stage {number} has layers with weight gradients apart"] = shape.split
            facts[f"whether experts of {name} of stage {number} are trained"] = shape.experts_split
    return facts


def values(stages: Mapping[int, Blocks], ties: Mapping[str, nn.Parameter], mesh: Mesh) -> Facts:
    """Return a sum over the bits of every parameter, which no order of summation changes; FSDP2's shards are left out.

    Of a DTensor over the tensor group it is the sum of this rank's part. ``ties`` have the names that all stages use.
    """
    number, count = mesh.expert_slice
    held = [
        (f"{place} of slice {number} of the experts" if expert and count > 1 else place, p)
        for place, p, expert in parameters_by_place(stages)
    ]
    held += [(f"tied parameter {name}", p) for name, p in ties.items()]
    kept = [(place, p) for place, p in _parts(held, mesh) if not p.is_meta]
    if not kept:
        return {}
    sums = torch.stack([_sum_of_bits(p.detach()).cpu() for _, p in kept]).tolist()
    return {f"the sum of bits of {place}": f"{bits:x}" for (place, _), bits in zip(kept, sums, strict=True)}


def _parts(held: Iterable[tuple[str, nn.Parameter]], mesh: Mesh) -> Iterator[tuple[str, Tensor]]:
    for place, parameter in held:
        if not isinstance(parameter, DTensor):
            yield place, parameter
        elif parameter.device_mesh.mesh.flatten().tolist() == mesh.along("tp"):
            whole = all(placement.is_replicate() for placement in parameter.placements)
            yield place if whole else f"part {mesh.rank('tp')} of {place}", parameter.to_local()


def shared_batch(name: str, given: Any, mesh: Mesh) -> Facts:
    """Return a sum over the bits of a batch's tensors, which must be the same on all ranks of a tensor group."""
    every = [part for part in _flat(given) if isinstance(part, Tensor)]
    if mesh.group("tp") is None or not every:
        return {}
    at = ", ".join(f"{dimension} {mesh.rank(dimension)}" for dimension in mesh.layout if dimension != "tp")
    return {f"the sum of bits of {name} on {at}": "+".join(f"{int(_sum_of_bits(part)):x}" for part in every)}


def _flat(given: Any) -> Iterator[Any]:
    if isinstance(given, Mapping):
        given = list(given.values())
    for part in given if isinstance(given, list | tuple) else ():
        yield from _flat(part)
    yield given


def calls(stages: Mapping[int, Blocks]) -> Facts:
    """Return the sizes with which experts were called, which are equal on all ranks."""
    return {
        f"call {seam} of experts in {stage.names[block]} of stage {number}": text
        for number, stage in stages.items()
        for (block, seam), text in stage.calls.items()
    }


def parameters_by_place(stages: Mapping[int, Blocks]) -> Iterator[tuple[str, nn.Parameter, bool]]:
    """Yield each parameter with its place in the model, and whether it is an expert's."""
    for number, stage in stages.items():
        for index, block in enumerate(stage.blocks):
            experts = {id(p) for module in stage.experts_of(index) for p in module.parameters()}
            for name, parameter in block.named_parameters():
                yield f"parameter {name} of {stage.names[index]} of stage {number}", parameter, id(parameter) in experts


def _sum_of_bits(tensor: Tensor) -> Tensor:
    whole: Any = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return whole.contiguous().view(_INTEGERS[whole.element_size()]).sum(dtype=torch.int64)
