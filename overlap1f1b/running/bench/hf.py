"""The benchmark of a model of transformers, with transformers' own expert parallelism beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from overlap1f1b.engine import Engine
from overlap1f1b.running.bench.measure import Bench, Bounds, asked_for, slowest, timed
from overlap1f1b.running.options import BenchOptions
from overlap1f1b.running.ranks import Rank
from overlap1f1b.running.workload import HfModel
from overlap1f1b.schedule import build_schedule
from overlap1f1b.terminal.output import Say

PEER = "transformers all_to_all"


class HfBench(Bench):
    """One rank's part of the benchmark of a model of transformers, on one stage."""

    model: HfModel

    def __init__(self, options: BenchOptions, rank: Rank, say: Say) -> None:
        super().__init__(options, rank, say)
        self.peer = OwnParallelism(self.model, rank, options.microbatches) if options.peers else None

    def _alone(self) -> HfModel:
        program = build_schedule("sequential", microbatches=self.options.microbatches)
        return HfModel(self.options, Rank(0, 1, self.rank.device, None), program)

    def _real_modules(self, model: HfModel) -> Sequence[nn.Module]:
        return model.split.routers

    def _loss(self, model: HfModel, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = model.split.model(x, labels=y, use_cache=False).loss
        return loss

    def _bounds(self, default: Engine) -> Bounds:
        bounds, peer = super()._bounds(default), self.peer
        if peer is None:
            return bounds
        return bounds | {PEER: lambda: timed(lambda: peer.step(self.inputs), self.rank)[0]}

    def _further(self, rows: list[dict[str, Any]], bounds: dict[str, float]) -> dict[str, Any]:
        if self.peer is None:
            return super()._further(rows, bounds)
        seconds = bounds[PEER]
        tokens = self.options.batch * self.options.sequence * self.rank.size
        losses = self.step(self.engine(asked_for(self.options)))[1].losses
        difference = abs(self.peer.loss - math.fsum(map(float, losses)) / len(losses)) / self.peer.loss
        theirs = {"step_ms": 1e3 * seconds, "tokens_per_s": tokens / seconds}
        theirs["loss_difference"] = slowest(difference, self.rank)
        fastest = min(row["step_ms"]["median"] for row in rows)
        return {"best_over_peers": theirs["step_ms"] / fastest, "peers": {PEER: theirs}}


class OwnParallelism:
    """A copy of the model under transformers' own expert parallelism, which waits for every exchange before it goes on.

    All parameters but the experts' are sharded by FSDP2, as transformers requires, gathered once a step and reduced
    after the last microbatch; FSDP2 cannot send less.
    """

    def __init__(self, model: HfModel, rank: Rank, microbatches: int) -> None:
        try:
            import accelerate  # noqa: F401
            from transformers import AutoModelForCausalLM
            from transformers.distributed.configuration_utils import DistributedConfig
            from transformers.distributed.expert_parallel import EPImplementationInterface  # noqa: F401
            from transformers.utils.logging import disable_progress_bar
        except ImportError as error:
            raise ValueError(
                f"--peers with --hf-config: {error}; allowed: transformers 5.23 or newer, and accelerate"
            ) from None
        disable_progress_bar()
        spread = DistributedConfig(fsdp_size=rank.size, ep_size=rank.size, ep_implementation="all_to_all")
        with TemporaryDirectory() if rank.rank == 0 else nullcontext() as own:
            folders: list[Any] = [own]
            dist.broadcast_object_list(folders, src=0)  # the same on all ranks of this machine
            model.split.save_pretrained(folders[0])
            made = AutoModelForCausalLM.from_pretrained(folders[0], distributed_config=spread, dtype=torch.float32)
            dist.barrier()
        self.model = made.train()
        self.microbatches, self.loss = microbatches, math.nan
        self._sharded = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        for module in self._sharded:
            module.set_reshard_after_forward(False)

    def step(self, tokens: Tensor) -> None:
        """Run forward and backward of a batch ``[B, S]``; ``loss`` is then the mean over its microbatches."""
        self.model.zero_grad(set_to_none=False)
        losses = []
        for index, x in enumerate(tokens.chunk(self.microbatches)):
            last = index == self.microbatches - 1
            for module in self._sharded:
                module.set_requires_gradient_sync(last)
                module.set_reshard_after_backward(last)
            loss = self.model(x, labels=x, use_cache=False).loss
            (loss / self.microbatches).backward()
            losses.append(float(loss.detach()))
        self.loss = math.fsum(losses) / len(losses)
