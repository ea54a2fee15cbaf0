"""Cases of torch.distributed.pipelining's schedules, played by the engine."""

from random import Random

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from overlap1f1b.engine import EngineOptions, split_blocks
from overlap1f1b.integrations.torch_pipelining import overlapped
from tests.campaign import plain
from tests.campaign.build import batch, build, loss_fn
from tests.campaign.compare import apart, limit_of, paused, values_of
from tests.campaign.draw import TORCH_SCHEDULES, Case
from tests.campaign.engine import TIMEOUT_S, costs_of


def play(rank: int, size: int, case: Case) -> list[str]:
    """Return the problems of a case on this rank."""
    (layout,), microbatches, problems = case.layouts, case.data.microbatches, []
    mesh = init_device_mesh("cpu", (layout.pp, layout.ep), mesh_dim_names=("pp", "ep"))
    at, shard = mesh.get_local_rank("pp"), mesh.get_local_rank("ep")
    blocks = build(case, mesh.get_group("ep") if layout.ep > 1 else None)
    folded, _ = TORCH_SCHEDULES[layout.schedule]
    numbers = (at, 2 * layout.pp - 1 - at if folded else layout.pp + at)
    weights = [0.0, *[1.0] * len(case.model.layers), 0.0]  # of embedding and head none: every stage has experts
    parts = [nn.Sequential(*part) for part in split_blocks(blocks, 2 * layout.pp, weights)]
    stages = [PipelineStage(parts[n], n, len(parts), torch.device("cpu"), group=mesh.get_group("pp")) for n in numbers]
    costs = {} if layout.overlap in ("serial", "pairs") else {"costs": costs_of(Random(case.seed))}
    schedule = overlapped(
        getattr(torch_schedules, layout.schedule)(stages, microbatches, loss_fn),
        mesh=mesh,
        options=EngineOptions(overlap=layout.overlap, timeout=TIMEOUT_S, **costs),
    )
    held = [(n, p) for n, p in plain.named(blocks) if any(p in set(parts[i].parameters()) for i in numbers)]
    for step in range(len(case.updates)):
        data = [batch(case, step, s) for s in range(layout.ep)]
        expected = plain.on_first_rank(lambda data=data: plain.walk(case, data, entry=True))[shard]
        inputs, target = (torch.cat(part) for part in zip(*data[shard], strict=True))
        losses: list[Tensor] = []
        for _, parameter in held:
            parameter.grad = None
        with paused(case, rank):
            schedule.step(
                *[inputs] if 0 in numbers else [], target=target if len(parts) - 1 in numbers else None, losses=losses
            )
        found = values_of(held, "", grad=True)
        wanted = {name: value / microbatches for name, value in expected.values.items()}  # torch scales by itself
        if losses:
            found["losses"], wanted["losses"] = torch.stack(losses).detach(), torch.stack(expected.losses)
        problems += [f"step {step}: {problem}" for problem in apart(found, wanted, shard, limit_of(case))]
    return problems
