"""The benchmark over several pipeline ranks, with torch.distributed.pipelining's schedules on the same layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed import pipelining

from overlap1f1b.engine import Engine, blocks_of, split_blocks
from overlap1f1b.integrations.torch_pipelining import overlapped
from overlap1f1b.moe import set_auxiliary_scale
from overlap1f1b.plan import Op, Resource, pipeline_bound
from overlap1f1b.running.bench.measure import Bench, Bounds, Player, slowest, taken
from overlap1f1b.running.workload import loss_fn
from overlap1f1b.schedule import Placement


class PipelineBench(Bench):
    """One rank's part of the benchmark over several pipeline ranks, compared with a plain loop over the whole model.

    Compute only is the compute of the busiest rank. A row's bound is that of any order over its placement, at the costs
    that were measured for it; its load is the larger of compute, and of exchanges and transfers.
    """

    shared_costs = False

    def _bounds(self, default: Engine) -> Bounds:
        def compute_only() -> float:
            spans = [span for span in self.step(default)[1].overlap.spans if span.node.resource is Resource.COMPUTE]
            return slowest(sum(span.end - span.start for span in spans), self.rank)

        return {"compute_only": compute_only, "exchange_only": self._exchange_only}

    def _floors(self, engine: Engine, bounds: Mapping[str, float]) -> Iterable[tuple[str, float]]:
        plan, costs = engine.plan, engine.costs
        assert costs is not None
        sends = max(sum(costs(node) for node in nodes if node.op is Op.SEND) for nodes in plan.ranks)
        yield "load", max(bounds["compute_only"], bounds["exchange_only"] + sends)
        yield "bound", pipeline_bound(plan.program.placement, plan.program.microbatches, plan.shapes, costs)

    def _reference(self) -> tuple[dict[nn.Parameter, Tensor], float]:
        self.plain_loop()
        return taken(self.model.parameters()), self.rank.data_ranks

    def _peers(self) -> list[Player]:
        return [TorchSchedule(name, self) for name in KINDS] if self.options.peers else []

    def _further(self, rows: list[dict[str, Any]], bounds: dict[str, float]) -> dict[str, Any]:
        torchs = {f"torch {name}": kind.overlapped for name, kind in KINDS.items()}
        theirs = [row["step_ms"]["median"] for row in rows if torchs.get(row["program"]) is False]
        ours = [row["step_ms"]["median"] for row in rows if row["program"] not in torchs]
        return {"best_over_peers": min(theirs) / min(ours) if theirs else None}


class TorchKind(NamedTuple):
    """A schedule of torch, the placement of its stages over ranks, and whether the engine plays its table."""

    schedule: Any
    placement: Callable[[int], Placement]
    overlapped: bool = False


KINDS = {
    "1F1B": TorchKind(pipelining.Schedule1F1B, Placement.loop),
    "Interleaved1F1B": TorchKind(pipelining.ScheduleInterleaved1F1B, partial(Placement.loop, chunks=2)),
    "ZBV": TorchKind(pipelining.ScheduleZBVZeroBubble, Placement.v),
    "DualPipeV": TorchKind(pipelining.ScheduleDualPipeV, Placement.v),
    "DualPipeV, overlapped": TorchKind(pipelining.ScheduleDualPipeV, Placement.v, overlapped=True),
}
"""Torch's schedules by their names in the tables."""


class TorchSchedule:
    """A schedule of torch on this rank, one of ``KINDS``, for the model and the options of ``bench``."""

    def __init__(self, name: str, bench: Bench) -> None:
        kind, options, rank = KINDS[name], bench.options, bench.rank
        assert rank.mesh is not None
        group = rank.mesh.get_group("pp")
        placement = kind.placement(group.size())
        parts = split_blocks(blocks_of(bench.model), placement.stages, bench.block_weights)
        held = [stage for _, stage in placement.places(group.rank())]
        self.modules = {stage: nn.Sequential(*parts[stage]) for stage in held}
        stages = [
            pipelining.PipelineStage(module, stage, placement.stages, rank.device, group=group)
            for stage, module in self.modules.items()
        ]
        self.name, self.overlap = f"torch {name}", ""
        self.first, self.last = 0 in held, placement.stages - 1 in held
        self.schedule = kind.schedule(stages if len(stages) > 1 else stages[0], options.microbatches, loss_fn)
        if kind.overlapped:
            engine_options = options.engine_options(parts=bench.parts, tries=0)
            self.schedule = overlapped(self.schedule, mesh=rank.mesh, options=engine_options, exchange=bench.recording)
            while self.schedule.engine.tuner.settling:
                bench.step(self)
            self.overlap = str(self.schedule.engine.plan.overlap)

    def step(self, inputs: Tensor, *, target: Tensor) -> object:
        """Run forward and backward of a batch; return the result that the engine has."""
        for module in self.modules.values():
            set_auxiliary_scale(module, 1.0)  # in the end torch divides all gradients by the number of microbatches
        arguments = (inputs,) if self.first else ()
        targets = {"target": target, "losses": []} if self.last else {}
        self.schedule.step(*arguments, **targets)
        return getattr(self.schedule, "result", None)

    def parameters(self) -> Iterator[nn.Parameter]:
        return chain.from_iterable(module.parameters() for module in self.modules.values())
