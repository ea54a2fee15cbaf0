"""Split a model into stages, and make the stages of a rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple, SupportsFloat

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from overlap1f1b.cut.blocks import blocks_of, blocks_of_stage, device_of
from overlap1f1b.cut.options import EngineOptions
from overlap1f1b.cut.stage import Stage
from overlap1f1b.kernels.choice import choose_nothing
from overlap1f1b.moe.experts import Experts
from overlap1f1b.reduce.fsdp import Sharding
from overlap1f1b.reduce.ties import ties_in
from overlap1f1b.schedule import Placement
from overlap1f1b.schedule.values import check_size, checked, quoted
from overlap1f1b.transport.exchange import Exchange
from overlap1f1b.transport.mesh import DIMENSIONS, Mesh

Model = nn.Module | Sequence[nn.Module] | Mapping[int, nn.Module | Sequence[nn.Module]]
"""An ``nn.Sequential`` or a list of blocks, the whole model; or the stages of this rank by their number."""


@checked
def split_blocks(
    blocks: Sequence[nn.Module], stages: int, block_weights: Sequence[float] | None = None
) -> list[list[nn.Module]]:
    """Split blocks into stages: the heaviest stage as light as possible, then all as equal as possible.

    On a tie earlier stages get more blocks.

    >>> [len(part) for part in split_blocks([nn.Identity()] * 5, 3)]
    [2, 2, 1]
    >>> [len(part) for part in split_blocks([nn.Identity()] * 6, 2, [0, 1, 1, 2, 1, 1])]
    [4, 2]

    Args:
        blocks: The blocks of the whole model.
        stages: Number of stages, each of at least one block.
        block_weights: Cost of each block, in any unit; by default all cost the same.

    Raises:
        ValueError: Fewer blocks than stages, or block_weights of another number, negative or infinite.
    """
    check_size("stages", stages)
    count = len(blocks)
    if count < stages:
        raise ValueError(f"{count} blocks for {stages} stages; allowed: at least one a stage")
    weights = [1.0] * count if block_weights is None else block_weights
    weights = list(weights) if isinstance(weights, Iterable) else weights
    numbers = isinstance(weights, list) and all(isinstance(weight, SupportsFloat) for weight in weights)
    if not numbers or len(weights) != count or not all(0 <= weight < math.inf for weight in weights):
        raise ValueError(f"block_weights {quoted(weights)} of {count} blocks; allowed: a finite number ≥ 0 of each")
    sums = [0.0, *accumulate(weights)]
    heaviest = _best_split(sums, stages, max)[0]  # it sets the pace of the pipeline
    starts = [0, *_best_split(sums, stages, lambda weight, rest: weight**2 + rest, heaviest)[1]]
    return [list(blocks[start:end]) for start, end in pairwise(starts)]


def _best_split(
    sums: Sequence[float], stages: int, combine: Callable[[float, float], float], heaviest: float = math.inf
) -> tuple[float, tuple[int, ...]]:
    """Return the best split: its cost, and where each stage ends, the first as late as possible.

    ``combine`` gives the cost of a stage's weight and of the stages behind it.
    """

    @cache
    def best(start: int, left: int) -> tuple[float, tuple[int, ...]]:
        """Return the best split of the blocks from ``start`` on into so many stages."""
        if left == 0:
            return 0.0 if start == len(sums) - 1 else math.inf, ()
        found: list[tuple[float, tuple[int, ...]]] = [(math.inf, ())]
        for end in range(start + 1, len(sums)):
            if (weight := sums[end] - sums[start]) <= heaviest:
                rest, ends = best(end, left - 1)
                found.append((combine(weight, rest), (end, *ends)))
        return min(found, key=lambda split: (split[0], [-end for end in split[1]]))

    return best(0, stages)


def stages_of(
    model: Model,
    placement: Placement,
    mesh: Mesh,
    exchange: Exchange,
    options: EngineOptions,
    *,
    reduce_dense: bool,
    reduce_experts: bool,
    gathers: bool = False,
) -> tuple[dict[int, Stage], Sharding]:
    """Return the stages of this rank by their number, and what FSDP2 holds, for nodes to gather if it ``gathers``.

    ValueError for too few blocks; stages that the rank does not hold; a parameter in two stages that do not tie it; a
    DTensor that is not FSDP2's over the mesh; experts over other ranks than the engine's.
    """
    held, tops = _held(model, placement, mesh.rank("pp"), options.block_weights)
    # If nothing is summed over ranks, stages of one rank may share parameters: each adds its own gradient.
    ties = [ties_in(model[stage]) for stage in held] if isinstance(model, Mapping) else []
    _refuse_in_two_stages([one.blocks for one in held.values()], ties, parameters=reduce_dense or reduce_experts)
    sharding = Sharding(
        *tops,
        ranks=mesh.ranks(pp=range(placement.ranks), over=DIMENSIONS),
        sharing=mesh.ranks(pp=[mesh.rank("pp")], over=mesh.experts_over),
        tensor=mesh.along("tp"),
    )
    if gathers:
        sharding.divide({stage: one.blocks for stage, one in held.items()})
    with sharding.gathered():
        # A stage without parameters computes where the rank's others do.
        device = device_of(chain.from_iterable(one.blocks for one in held.values())) or mesh.device
        stages = {
            stage: Stage(
                one.blocks,
                exchange,
                number=stage,
                first=one.first,
                sliced=sharding.sliced,
                reduce_dense=reduce_dense,
                reduce_experts=reduce_experts,
                gathered={block for of, block in sharding.of_block if of == stage},
                device=device,
            )
            for stage, one in held.items()
        }
    for stage in stages.values():
        _check_groups(stage, mesh)
        if mesh.group("tp") is not None:
            choose_nothing(stage.blocks)
    return stages, sharding


class _Held(NamedTuple):
    """The blocks of a stage that this rank holds, and the position of the first of them in the model."""

    blocks: Sequence[nn.Module]
    first: int


def _held(
    model: Model, placement: Placement, rank: int, weights: Sequence[float] | None
) -> tuple[dict[int, _Held], list[Any]]:
    """Return what a pipeline rank holds, and the modules or lists in which FSDP2 is looked for.

    These are in the order of stages, so that ranks with the same stages gather them in the same order.
    """
    numbers = [stage for _, stage in placement.places(rank)]
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"stages {numbers} on rank {rank}; allowed: each stage once on a rank")
    if isinstance(model, Mapping):
        if weights is not None:
            raise ValueError("block_weights of stages that are given; allowed: of the blocks of a whole model")
        if sorted(model) != sorted(numbers):
            raise ValueError(f"stages {sorted(model)} on pipeline rank {rank}; allowed: {sorted(numbers)}")
        held = {stage: _Held(blocks_of_stage(model[stage]), 0) for stage in numbers}
        return held, [model[stage] for stage in sorted(numbers)]
    every = blocks_of(model)
    if not every:
        raise ValueError("a model without blocks; allowed: an nn.Sequential or a list of at least one module")
    split = split_blocks(every, placement.stages, weights)
    _refuse_in_two_stages(split)
    held = {stage: _Held(split[stage], sum(map(len, split[:stage]))) for stage in numbers}
    whole = isinstance(model, nn.Module) and placement.ranks == 1
    return held, [model] if whole else [held[stage].blocks for stage in sorted(numbers)]


def _check_groups(stage: Stage, mesh: Mesh) -> None:
    """Raise ValueError if experts are shared by other ranks than the engine exchanges with."""
    along = mesh.exchanging
    if along is None:  # one rank, or an exchange that was given to measure with
        return
    ranks = dist.get_process_group_ranks(along)
    for name, block in zip(stage.names, stage.blocks, strict=True):
        for experts in (m for m in block.modules() if isinstance(m, Experts) and m.group is not None):
            shared = dist.get_process_group_ranks(experts.group)
            if shared != ranks:
                raise ValueError(
                    f"{name} holds experts that ranks {shared} share, the engine's ranks along "
                    f"{', '.join(map(repr, mesh.experts_over))} are {ranks}; "
                    "allowed: the same, in this order"
                )


def _refuse_in_two_stages(
    stages: Sequence[Sequence[nn.Module]], ties: Sequence[Mapping[str, nn.Parameter]] = (), *, parameters: bool = True
) -> None:
    """Raise a ValueError for a parameter that two stages hold, unless both name it alike in ``ties``.

    With ``parameters=False`` for a module alone: where nothing is summed over ranks, stages may share parameters.
    """
    what, also = ("parameter", ", or named in the attribute tied of both") if parameters else ("module", "")
    seen: dict[nn.Parameter | nn.Module, int | str] = {}
    for number, blocks in enumerate(stages):
        tied = {parameter: name for name, parameter in ties[number].items()} if ties else {}
        for block in blocks:
            for name, member in block.named_parameters() if parameters else block.named_modules():
                home = tied.get(member, number)
                if seen.setdefault(member, home) != home:
                    raise ValueError(
                        f"{f'{what} {name} of ' if name else ''}a {type(block).__name__} belongs to two stages; "
                        f"allowed: shared inside one stage{also}"
                    )


def tensor_mesh_of(stages: Iterable[Stage], mesh: Mesh) -> DeviceMesh | None:
    """Return the mesh of this rank's tensor group: the one that DTensors of the model have; None for one rank."""
    for parameter in (p for stage in stages for dense in stage.dense_parameters for p in dense):
        if isinstance(parameter, DTensor) and parameter.device_mesh.mesh.flatten().tolist() == mesh.along("tp"):
            return parameter.device_mesh
    return mesh.devices["tp"] if mesh.devices is not None and mesh.group("tp") is not None else None
