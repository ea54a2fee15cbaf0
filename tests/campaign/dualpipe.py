"""Cases of the drop-ins for DualPipe and DualPipeV."""

from random import Random

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b.engine import EngineOptions, split_blocks
from overlap1f1b.integrations.dualpipe import DualPipe, DualPipeV
from tests.campaign import plain
from tests.campaign.build import Microbatch, batch, build, loss_fn
from tests.campaign.compare import Values, apart, limit_of, paused, values_of
from tests.campaign.draw import Case
from tests.campaign.engine import TIMEOUT_S, costs_of

CLASSES = {"dualpipe": DualPipe, "dualpipev": DualPipeV}


def play(rank: int, size: int, case: Case) -> list[str]:
    """Return the problems of a case on this rank."""
    pipeline, problems = Pipeline(case), []
    for step in range(len(case.updates)):
        data = pipeline.data(step)
        expected = plain.on_first_rank(lambda data=data: [plain.walk(case, pipe, entry=False) for pipe in data])
        with paused(case, rank):
            found = pipeline.step(data)
        wanted = pipeline.wanted(expected)
        problems += [f"step {step}: {problem}" for problem in apart(found, wanted, pipeline.shard, limit_of(case))]
    return problems


class Pipeline:
    """A drop-in over a case's model, of which this rank holds two stages."""

    def __init__(self, case: Case) -> None:
        (layout,) = case.layouts
        self.case, self.program = case, layout.program(case.data.microbatches)
        mesh = init_device_mesh("cpu", (layout.pp, layout.ep), mesh_dim_names=("pp", "ep"))
        self.shards, self.shard = layout.ep, mesh.get_local_rank("ep")
        placement = self.program.placement
        self.places = placement.places(mesh.get_local_rank("pp"))
        self.begins = next((pipe for pipe, stage in self.places if stage == 0), None)
        self.ends = next((pipe for pipe, stage in self.places if stage == placement.stages - 1), None)
        blocks = build(case, mesh.get_group("ep"), entry=False)
        parts = split_blocks(blocks, placement.stages)
        self.held = {  # by pipe
            pipe: [(n, p) for n, p in plain.named(blocks) if p in set(nn.Sequential(*parts[stage]).parameters())]
            for pipe, stage in self.places
        }
        self.pipe = CLASSES[layout.schedule](
            [nn.Sequential(*parts[stage]) for _, stage in self.places],
            process_group=mesh.get_group("pp"),
            expert_group=mesh.get_group("ep") if layout.ep > 1 else None,
            options=EngineOptions(
                overlap=layout.overlap,
                costs=None if layout.measured else costs_of(Random(case.seed)),
                timeout=TIMEOUT_S,
            ),
        )

    def data(self, step: int) -> list[list[list[Microbatch]]]:
        """The microbatches of a step by pipe and shard."""
        shards = [batch(self.case, step, shard, entry=False) for shard in range(self.shards)]
        pipes = range(len(self.program.placement.pipes))
        return [[[mine[i] for i in self.program.microbatches_of(pipe)] for mine in shards] for pipe in pipes]

    def step(self, data: list[list[list[Microbatch]]]) -> Values:
        """Play a step; return gradients, losses where microbatches end, and inputs' gradients where they begin."""
        for parameter in self.pipe.parameters():
            parameter.grad = None
        inputs = None if self.begins is None else _joined(data[self.begins][self.shard], 0).requires_grad_()
        losses, _ = self.pipe.step(
            inputs,
            num_chunks=self.case.data.microbatches,
            criterion=loss_fn,
            labels=[None if self.ends is None else _joined(data[self.ends][self.shard], 1)],
        )
        found: Values = {}
        for pipe, held in self.held.items():
            found |= values_of(held, f"pipe {pipe} ", grad=True)
        if losses is not None:
            found["losses"] = losses
        if inputs is not None and inputs.grad is not None:
            found["inputs"] = inputs.grad
        return found

    def wanted(self, expected: list[list[plain.Parts]]) -> Values:
        """Return the same values of the plain loop."""
        wanted = {
            f"pipe {pipe} {name}": value
            for pipe, held in self.held.items()
            for name, value in expected[pipe][self.shard].values.items()
        }
        if self.ends is not None:
            wanted["losses"] = torch.stack(expected[self.ends][self.shard].losses)
        if self.begins is not None:
            wanted["inputs"] = torch.cat(expected[self.begins][self.shard].input_grads)
        return wanted


def _joined(data: list[Microbatch], which: int) -> Tensor:
    return torch.cat([microbatch[which] for microbatch in data])
