"""Cases of combined_forward_backward_step, called by hand over one stage or two."""

from dataclasses import replace

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b.engine import Microbatch, Stage, combined_forward_backward_step
from overlap1f1b.transport.exchange import build_exchange
from tests.campaign import plain
from tests.campaign.build import batch, build, loss_fn
from tests.campaign.compare import Values, apart, limit_of, paused, unequal, values_of
from tests.campaign.draw import Case, Layout
from tests.campaign.engine import TIMEOUT_S


def play(rank: int, size: int, case: Case) -> list[str]:
    """Return the problems of a case on this rank."""
    group = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)).get_group("ep")
    (layout,), problems = case.layouts, []
    for step in range(len(case.updates)):
        data = [batch(case, step, shard, entry=False) for shard in range(size)]
        with paused(case, rank):
            found = walk(case, layout, data[rank], group)
        serial = replace(layout, overlap="serial", recompute="none", split=False)
        again = walk(case, serial, data[rank], group)
        problems += [f"{name} is not that of serial steps" for name in unequal(found, again)]
        if case.deterministic:
            wanted = plain.on_first_rank(lambda data=data: expected(case, data))[rank]
            problems += apart(found, wanted, rank, limit_of(case))
    return problems


def expected(case: Case, data: list[list[tuple[Tensor, Tensor]]]) -> list[Values]:
    """Return the values that each rank must find."""
    every = plain.walk(case, data, entry=False, scale=1 / case.data.microbatches)
    return [
        part.values
        | {f"loss {index}": loss for index, loss in enumerate(part.losses)}
        | {f"input {index}": grad for index, grad in enumerate(part.input_grads) if grad is not None}
        for part in every
    ]


def walk(case: Case, layout: Layout, data: list[tuple[Tensor, Tensor]], group: dist.ProcessGroup) -> Values:
    """Losses and gradients of a loop in which each microbatch meets the one before."""
    blocks = build(case, group, entry=False)
    steps = Steps(case, layout, blocks, group)
    for index, (x, y) in enumerate(data):
        steps.take(index, x, y)
    return steps.end() | values_of(plain.named(blocks), "", grad=True)


class Steps:
    """A loop over microbatches on one stage; or on two, whose forward meets the first one's backward before it."""

    def __init__(self, case: Case, layout: Layout, blocks: list[nn.Module], group: dist.ProcessGroup) -> None:
        self.case, self.layout, exchange = case, layout, build_exchange(group)
        cut = len(blocks) // 2 if layout.chunks == 2 else 0
        parts = [blocks[:cut], blocks[cut:]] if cut else [blocks]
        self.stages = [
            Stage(part, exchange, number=number, recompute=layout.recompute) for number, part in enumerate(parts)
        ]
        self.found: Values = {}
        self.behind: list[Microbatch] = []  # of the microbatch before: run forward on every stage

    def take(self, index: int, x: Tensor, y: Tensor) -> None:
        """Runs a microbatch forward while the one before it runs backward."""
        entered: list[Microbatch] = []
        value, grad = x.clone().requires_grad_(), None
        for stage in self.stages:
            last, scale = stage is self.stages[-1], 1 / self.case.data.microbatches  # of auxiliary losses on any stage
            ends = {"target": y, "loss_fn": loss_fn} if last else {}
            entered.append(Microbatch(stage, value, index=index, seed=index, loss_grad=scale, **ends))
            value, grad = self._step(entered[-1], grad)
            value = value.requires_grad_() if not last else value
        self.found[f"loss {index}"] = value
        self.behind = entered

    def end(self) -> Values:
        """Runs the last microbatch backward; everything that was found."""
        grad = None
        while self.behind:
            _, grad = self._step(None, grad)
        return self.found

    def _step(self, forward: Microbatch | None, grad: Tensor | None) -> tuple[Tensor, Tensor | None]:
        backward = self.behind.pop() if self.behind else None
        value, input_grad = combined_forward_backward_step(
            forward,
            backward,
            output_grad=grad if backward is not None else None,
            overlap=self.layout.overlap,
            split=self.layout.split,
            timeout=TIMEOUT_S,
        )
        if backward is not None:
            if self.layout.split:
                backward.accumulate_weights()
            if backward.stage is self.stages[0]:
                self.found[f"input {backward.index}"] = input_grad
        return value, input_grad
