"""Facts that must be equal on ranks that train together, for :meth:`Mesh.agree`, and what a first step has shown.

Ranks that differ in an option would wait for each other for ever, or go on with wrong gradients. If gradients and
tokens of ranks that share a tensor group do not fit the layout, routers, norms or experts would learn from wrong
gradients in silence.
"""

from __future__ import annotations

import hashlib
import re
from collections import ChainMap, Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from overlap1f1b.cut.bits import is_plain, local_part, sum_of_bits
from overlap1f1b.cut.blocks import tensor_dimension
from overlap1f1b.cut.stage import Stage, parameters_of
from overlap1f1b.cut.weights import main_grad
from overlap1f1b.play.observers import ExpertCall, Observer
from overlap1f1b.schedule import Program
from overlap1f1b.transport.mesh import Mesh, lines_of

Facts = dict[str, object]
_NUMBER = re.compile(r"\d+")


def described(program: Program) -> str:
    """Return a text that differs if programs do."""
    order = hashlib.sha256(program.draw().encode()).hexdigest()[:8]
    text = f"{program.name} of {program.microbatches} microbatches over {program.placement.ranks} ranks, order {order}"
    if program.search_seconds:
        text += f", search of {program.search_seconds:g} s within {program.peak_activations}"
    return text


def structure(stages: Mapping[int, Stage]) -> Facts:
    """Return the blocks of the stages, and their parameters: shape, dtype, whether it is trained, and shared.

    A shared gradient is summed over ranks once.
    """
    facts: Facts = {}
    first: dict[nn.Parameter, str] = {}
    for name, where, p, _ in parameters_of(dict(sorted(stages.items()))):
        place = f"parameter {name} of {where}"
        shared = "" if first.setdefault(p, place) == place else f", {first[p]}"
        facts[place] = f"{str(p.dtype)[6:]}{list(p.shape)}{'' if p.requires_grad else ' frozen'}{shared}"
    for number, stage in stages.items():
        facts[f"the number of blocks of stage {number}"] = len(stage.blocks)
        for name, shape in zip(stage.names, stage.shape, strict=True):
            facts[f"the number of experts' calls in {name} of stage {number}"] = shape.expert_calls
            facts[f"whether {name} of stage {number} has layers with weight gradients apart"] = shape.split
            facts[f"whether experts of {name} of stage {number} are trained"] = shape.experts_split
    return facts


def values(stages: Mapping[int, Stage], ties: Mapping[str, nn.Parameter], mesh: Mesh) -> Facts:
    """Return a sum over the bits of every parameter, and places and names of trained parameters that are no experts'.

    No order of summation changes the sums. FSDP2's shards have none; of a DTensor or a slice over the tensor group it
    is the sum of this rank's part. ``ties`` have the names that all stages use.

    Of buffers, those whose name ends in ``bias`` have one, by which routers choose: other buffers, such as running
    statistics, depend on what a rank has seen. Ranks of a tensor group may have slices of them.
    """
    number, count = mesh.expert_slice
    of_slice = f" of slice {number} of the experts" if count > 1 else ""
    held = [
        (f"parameter {name} of {where}{of_slice if expert else ''}", p, expert)
        for name, where, p, expert in parameters_of(stages)
    ]
    held += [(f"tied parameter {name}", p, False) for name, p in ties.items()]
    facts = _places(stages)
    for place, p, expert in held:
        sliced, own = tensor_dimension(p, mesh, expert=expert) is not None, p.detach()
        if isinstance(own, DTensor):
            if own.device_mesh.mesh.flatten().tolist() != mesh.along("tp"):
                continue
            sliced, own = not all(placement.is_replicate() for placement in own.placements), own.to_local()
        if not own.is_meta:
            part = f"part {mesh.rank('tp')} of " if sliced else ""
            facts[f"the values of {part}{place}"] = f"{int(sum_of_bits(own)):x}"
    part = "" if mesh.group("tp") is None else f" of part {mesh.rank('tp')}"
    for number, stage in stages.items():
        for index, (block, where) in enumerate(zip(stage.blocks, stage.names, strict=True)):
            of_experts = {id(buffer) for module in stage.experts_of(index) for buffer in module.buffers()}
            for name, buffer in block.named_buffers():
                if name.endswith("bias") and id(buffer) not in of_experts and is_plain(local_part(buffer)):
                    bits = int(sum_of_bits(buffer, ordered=True))  # biases of experts may be swapped
                    facts[f"the values{part} of buffer {name} of {where} of stage {number}"] = f"{bits:x}"
    return facts


def _places(stages: Mapping[int, Stage]) -> Facts:
    """Return facts that differ if ranks have numbered experts of their own, or another order of modules.

    Gradients are summed by their places. Names may differ, as by a wrapper on one rank.
    """
    facts: Facts = {}
    seen = Counter({f"{name} of stage {number}": 0 for number, stage in stages.items() for name in stage.names})
    for name, where, parameter, expert in parameters_of(stages):
        if parameter.requires_grad and not expert:
            facts[f"the place of {name} among the trained parameters of {where}"] = seen[where]
            facts[f"trained parameter {seen[where]} ({_NUMBER.sub('*', name)}) of {where}"] = name
            seen[where] += 1
    return facts | {f"the number of trained parameters of {where}": count for where, count in seen.items()}


def compare_batches(batches: Mapping[str, Any], mesh: Mesh, needed: Collection[str] = ()) -> list[str]:
    """Compare the batches of a step over ranks; return those that differ, in any bit, between ranks of a pipeline.

    One without tensors equals any. ValueError if ranks of a tensor group need and have different tensors. All must call
    this.
    """
    if mesh.group("tp") is None and mesh.group("pp") is None:
        return []
    sums = {
        name: [(part.shape, int(sum_of_bits(part, ordered=True))) for part in _tensors_in(batch)]
        for name, batch in batches.items()
    }
    if mesh.group("tp") is not None:
        at = ", ".join(f"{dimension} {mesh.rank(dimension)}" for dimension in mesh.layout if dimension != "tp")
        texts = {name: "+".join(f"{bits:x}" for _, bits in sums[name]) for name in needed if sums[name]}
        mesh.agree({f"the values of {name} on {at}": text for name, text in texts.items()})
    ranks = mesh.gathered("pp", sums)
    return [name for name in batches if len({tuple(one[name]) for one in ranks if one[name]}) > 1]


def _tensors_in(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping | list | tuple):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors_in(part)


MOST_APART, SMALL = 0.125, 2**-5
"""Largest difference of gradients that should be equal, of their norm, and norms that are not compared, of the largest.

Kernels may round in another order on each rank, in bfloat16, too, and a gradient may be nothing but such roundings.
"""


class CallSizes(Observer):
    """Compares the sizes of each call of experts before its first exchange: they must be equal on all ranks."""

    rehearses = True
    by_node = False  # the first forward of each block shows them

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._agreed: set[tuple[int, int, int]] = set()  # stages, blocks, calls

    def routed(self, call: ExpertCall) -> None:
        """Compare the sizes of a call of experts over ranks, once for each call."""
        if call[:3] in self._agreed:
            return
        self._agreed.add(call[:3])
        route = call.route
        bits = f", sent in {route.precision}" if route.precision else ""
        sizes = f"{route.top_k} experts a token, hidden {route.hidden}, {str(call.rows.dtype)[6:]}{bits}"
        name = f"call {call.call} of experts in {call.where} of stage {call.stage}"
        self._mesh.agree({name: sizes}, over=("dp", "ep", "cp", "tp"))


class FirstRows(Observer):
    """Keeps the first rows that went to experts: ``found`` has ``[≤ 64, H]`` by (stage, block, call)."""

    rehearses = True

    def __init__(self) -> None:
        self.found: dict[tuple[int, int, int], Tensor] = {}

    def routed(self, call: ExpertCall) -> None:
        if call[:3] not in self.found:
            self.found[call[:3]] = call.rows.detach()[:64, : call.route.hidden].clone()


def check_tensor_group(stages: Mapping[int, Stage], mesh: Mesh, first: Mapping[tuple[int, int, int], Tensor]) -> None:
    """Compare what a tensor group has computed in the first step; all of its ranks must call this.

    Of gradients 64 entries are compared, of tokens the ``first`` rows of each call. ValueError if gradients of copies
    differ, as where each rank has other tokens, or experts that are shared have got the same tokens from each rank.
    """
    if mesh.group("tp") is None:
        return
    grads = {
        f"parameter {name} of {where}": entries_of(grad)
        for name, where, p, expert in parameters_of(stages)
        if not (expert and "tp" in mesh.experts_over)
        and _is_copied(p, mesh, expert=expert)
        and (grad := main_grad(p) if p.grad is None else p.grad) is not None
    }
    rows = {call: of.double().cpu() for call, of in first.items()}
    ranks = mesh.gathered("tp", (grads, rows))
    _check_gradients([found for found, _ in ranks], mesh)
    if rows and all(_are_the_same([found[call] for _, found in ranks]) for call in rows):
        raise ValueError(
            f"experts_over={mesh.experts_over!r} with the same tokens on all ranks of a tensor group, "
            f"{mesh.along('tp')}; allowed: a part of the tokens on each, as with SequenceParallel, or no 'tp' in it"
        )


def _check_gradients(grads: Sequence[dict[str, Tensor]], mesh: Mesh) -> None:
    """Raise ValueError for a gradient that the ranks of a tensor group should have alike, and have not."""
    sampled: dict[str, Tensor] = {}  # [ranks, entries], with zeros for ranks that have no gradient
    for place, known in ChainMap(*grads).items():
        sampled[place] = torch.stack([found.get(place, torch.zeros_like(known)) for found in grads])
    largest = max(map(_longest, sampled.values()), default=0.0)
    for place, each in sampled.items():
        apart, norm = _longest(each - each[0]), _longest(each)
        if apart > MOST_APART * norm and norm > SMALL * largest:
            raise ValueError(
                f"the gradient of {place} differs over the tensor group, ranks {mesh.along('tp')}, by "
                f"{apart / norm:.1%}; allowed: the same tokens and random numbers on each, or a DTensor whose gradient "
                "has placements Partial where each has other tokens"
            )


def _is_copied(tensor: nn.Parameter, mesh: Mesh, *, expert: bool) -> bool:
    """Return whether all ranks of a tensor group have the same tensor, or the same part of it."""
    if not isinstance(tensor, DTensor):
        return tensor_dimension(tensor, mesh, expert=expert) is None
    group, lines = set(mesh.along("tp")), lines_of(tensor.device_mesh)
    along = [placement for line, placement in zip(lines, tensor.placements, strict=True) if group <= set(line)]
    return all(placement.is_replicate() for placement in along)


def entries_of(tensor: Tensor) -> Tensor:
    """Return up to 64 entries, evenly spread, in float64."""
    flat = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().reshape(-1)
    last, count = max(0, flat.numel() - 1), min(64, flat.numel())
    return flat[torch.linspace(0, last, count, dtype=torch.float64, device="cpu").long()].double().cpu()


def _longest(vectors: Tensor) -> float:
    return float(vectors.norm(dim=1).max())


def _are_the_same(rows: Sequence[Tensor]) -> bool:
    """Return whether all ranks have sent the same ``[rows, H]`` to experts; False where the rows are all alike."""
    if len({part.shape for part in rows}) > 1:
        return False
    spread = (rows[0] - rows[0].mean(0)).norm()
    return all(bool((part - rows[0]).norm() < 0.01 * spread) for part in rows)
