"""Models of transformers in the ablation table, and transformers' own expert parallelism beside them."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from overlap1f1b.cli.bench.hollow import hollow
from overlap1f1b.cli.bench.measure import Bench, slowest
from overlap1f1b.cli.hf import HfModel
from overlap1f1b.cli.ranks import Rank
from overlap1f1b.engine import LossFunction
from overlap1f1b.engine.stages import Model

PEER = "transformers all_to_all"


class HfBench(Bench):
    """One rank's part of the benchmark of a model of transformers, on one stage."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.inputs = self.target = torch.cat([self.inputs, self.target[:, -1:]], dim=1)  # the model shifts its labels
        self.peer = OwnParallelism(self.model, self.rank, self.options.microbatches) if self.options.peers else None

    def _built(self) -> tuple[nn.Module, Model, LossFunction]:
        self.model: HfModel = HfModel(self.options, self.rank, self.options.program())
        return self.model, self.model.split, self.model.split.loss_fn

    def _computing(self) -> AbstractContextManager[None]:
        return hollow(self.model, real=self.model.split.routers) if self.options.compute == "timed" else nullcontext()

    def _phases(self) -> dict[str, Callable[[], float]]:
        if self.peer is None:
            return {}
        peer = self.peer

        def step() -> float:
            self._meet()
            start = time.perf_counter()
            peer.step(self.inputs, self.target)
            return slowest(time.perf_counter() - start, self.rank)

        return {PEER: step}

    def _plain(self) -> float:
        self._clear_gradients()
        model, count = self.model.split.model, self.options.microbatches
        start = time.perf_counter()
        for x in self.inputs.chunk(count):
            (model(x, labels=x, use_cache=False).loss / count).backward()
        return time.perf_counter() - start

    def _summary(self, rows: Any, timed: dict[str, Any], *others: Any) -> dict[str, Any]:
        result = super()._summary(rows, timed, *others)
        if self.peer is not None:
            seconds = timed["bounds"][PEER]
            own = min(row["step_ms"]["median"] for row in result["rows"])
            tokens = self.options.batch * self.options.sequence * self.rank.size
            losses = self.step(self.engine(rows[0]))[1].losses
            difference = abs(self.peer.loss - math.fsum(map(float, losses)) / len(losses)) / self.peer.loss
            result["peers"] = {
                PEER: {
                    "step_ms": 1e3 * seconds,
                    "tokens_per_s": tokens / seconds,
                    "loss_difference": slowest(difference, self.rank),
                }
            }
            result["best_over_peers"] = 1e3 * seconds / own
        return result


class OwnParallelism:
    """The same model under transformers' own expert parallelism: its exchange is waited for where it is needed.

    What is not an expert is sharded by FSDP2, as transformers asks for. It is gathered once a step and reduced after
    the last microbatch, which is the least that it can send.

    Args:
        model: Whose weights it takes.
        rank: This process, one of those that share the experts.
        microbatches: Of a step.

    Raises:
        ValueError: transformers is older than 5.23, or accelerate is not installed.
    """

    def __init__(self, model: HfModel, rank: Rank, microbatches: int) -> None:
        try:
            import accelerate  # noqa: F401
            from transformers import AutoModelForCausalLM
            from transformers.distributed.configuration_utils import DistributedConfig
            from transformers.distributed.expert_parallel import EPImplementationInterface  # noqa: F401
            from transformers.utils.logging import disable_progress_bar
        except ImportError as error:
            raise ValueError(f"--peers with --hf-config: {error}; allowed: transformers 5.23 and accelerate") from None
        folders: list[Any] = [tempfile.mkdtemp() if rank.rank == 0 else None]
        dist.broadcast_object_list(folders, src=0)
        model.split.save_pretrained(folders[0])
        disable_progress_bar()
        spread = DistributedConfig(fsdp_size=rank.size, ep_size=rank.size, ep_implementation="all_to_all")
        self.model = AutoModelForCausalLM.from_pretrained(
            folders[0], distributed_config=spread, dtype=torch.float32
        ).train()
        self.microbatches, self.loss = microbatches, math.nan
        self._sharded = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        for module in self._sharded:
            module.set_reshard_after_forward(False)
        dist.barrier()
        if rank.rank == 0:
            for file in Path(folders[0]).iterdir():
                file.unlink()
            Path(folders[0]).rmdir()

    def step(self, inputs: Tensor, target: Tensor) -> None:
        """Forward and backward of a batch."""
        self.model.zero_grad(set_to_none=False)
        losses = []
        for index, (x, y) in enumerate(
            zip(inputs.chunk(self.microbatches), target.chunk(self.microbatches), strict=True)
        ):
            last = index == self.microbatches - 1
            for module in self._sharded:
                module.set_requires_gradient_sync(last)
                module.set_reshard_after_backward(last)
            loss = self.model(x, labels=y, use_cache=False).loss
            (loss / self.microbatches).backward()
            losses.append(float(loss.detach()))
        self.loss = math.fsum(losses) / len(losses)
