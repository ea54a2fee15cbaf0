"""torch.distributed.pipelining's schedules over the same layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from overlap1f1b.cli.ranks import Rank
from overlap1f1b.cli.workload import loss_fn
from overlap1f1b.engine import split_blocks
from overlap1f1b.integrations.torch_pipelining import register
from overlap1f1b.moe import set_auxiliary_scale
from overlap1f1b.schedule import Placement
from overlap1f1b.transport.exchange import Exchange


class PeerShape(NamedTuple):
    """torch's schedule, where its stages lie, and whether the engine plays its compute."""

    schedule: Any
    shape: str
    registered: bool = False


PEERS = {
    "1F1B": PeerShape(Schedule1F1B, "single"),
    "Interleaved1F1B": PeerShape(ScheduleInterleaved1F1B, "loop"),
    "ZBV": PeerShape(ScheduleZBVZeroBubble, "v"),
    "DualPipeV": PeerShape(ScheduleDualPipeV, "v"),
    "DualPipeV, registered": PeerShape(ScheduleDualPipeV, "v", registered=True),
}
"""By the name in tables."""


class Peer:
    """One of torch's schedules on this rank.

    Args:
        name: One of ``PEERS``.
        blocks: The whole model.
        weights: Of its blocks, as they are cut into stages.
        rank: This process.
        microbatches: Of a step.
        exchange: Between the ranks that share the experts, where the engine plays the compute.
        timeout: Limit of its waits, in seconds.
    """

    def __init__(
        self,
        name: str,
        blocks: Sequence[nn.Module],
        weights: Sequence[float],
        rank: Rank,
        microbatches: int,
        exchange: Exchange,
        timeout: float,
    ) -> None:
        kind = PEERS[name]
        assert rank.mesh is not None
        group = rank.mesh.get_group("pp")
        ranks = group.size()
        self.registered = kind.registered
        self.placement = {
            "single": Placement.loop(ranks),
            "loop": Placement.loop(ranks, 2),
            "v": Placement.v(ranks),
        }[kind.shape]
        parts = split_blocks(blocks, self.placement.stages, weights)
        held = [stage for _, stage in self.placement.places(group.rank())]
        self.modules = {stage: nn.Sequential(*parts[stage]) for stage in held}
        stages = [
            PipelineStage(module, stage, self.placement.stages, rank.device, group=group)
            for stage, module in self.modules.items()
        ]
        self.first, self.last = 0 in held, self.placement.stages - 1 in held
        self.microbatches = microbatches
        self.schedule = kind.schedule(stages[0] if kind.shape == "single" else stages, microbatches, loss_fn)
        if kind.registered:
            register(self.schedule, exchange=exchange, timeout=timeout)

    def step(self, inputs: Tensor, target: Tensor) -> list[Tensor]:
        """Forward and backward of a batch; the losses of its microbatches, where the last stage is."""
        for module in self.modules.values():
            set_auxiliary_scale(module, 1.0)  # torch divides all gradients by the microbatches in the end
        losses: list[Tensor] = []
        arguments = (inputs,) if self.first else ()
        targets = {"target": target, "losses": losses} if self.last else {}
        self.schedule.step(*arguments, **targets)
        return losses

    def parameters(self) -> list[nn.Parameter]:
        """Of this rank's stages."""
        return [parameter for module in self.modules.values() for parameter in module.parameters()]
