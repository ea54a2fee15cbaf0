"""A part of a forward, its exchanges included, that is computed again."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from overlap1f1b.engine.run.again import _answered, run_again
from overlap1f1b.engine.run.model import MicrobatchBlock
from overlap1f1b.schedule import build_schedule
from overlap1f1b.transport.calls import exchange
from overlap1f1b.transport.suspend import Forward
from tests.engines import COSTS, make
from tests.ranks import over


class Block(MicrobatchBlock):
    """Exchanges rows there and back, in a part that is computed again, with another such part inside."""

    def __init__(self, group: dist.ProcessGroup, *, differs: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.group, self.differs = nn.Linear(8, 8), nn.Linear(8, 8), group, differs
        self.register_buffer("calls", torch.zeros(()))
        self.again = True

    def forward(self, x: Tensor, microbatch: Any = None) -> Tensor:
        forward = Forward.running()
        if forward is not None and self.again:
            forward.part = partial(run_again, microbatch.runs[0])
        return x + self.repeated(self.part, x)

    def repeated(self, function: Any, x: Tensor) -> Tensor:
        forward = Forward.running()
        if forward is None or forward.part is None or not torch.is_grad_enabled():
            return function(x)
        return forward.part(function, (x,))

    def part(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        rows = exchange(self.first(x).tanh(), None, None, self.group)
        rows = self.repeated(lambda rows: self.second(rows).tanh().sin(), rows)
        if self.differs and Forward.running().bring is _answered:  # in the second forward
            rows = rows.cos()
        return exchange(rows, None, None, self.group).tanh() * self.first(x)


def stepped(mesh: DeviceMesh, **given: Any) -> Block:
    torch.manual_seed(3)
    block = Block(mesh.get_group("ep"), **{name: value for name, value in given.items() if name == "differs"})
    block.again = given.get("again", True)
    program = build_schedule("combined_1f1b", microbatches=3)
    engine = make([block], program, mesh=mesh, costs=COSTS, loss_fn=F.mse_loss, timeout=30)
    data = torch.randn(12, 8, generator=torch.Generator().manual_seed(mesh.get_local_rank("ep")))
    for _ in range(3):
        block.zero_grad()
        engine.step(data, target=data.roll(1, 0))
    return block


@over(2)
def test_gradients_and_buffers_are_those_of_one_forward(rank: int, size: int) -> list[str]:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    plain, again = stepped(mesh, again=False), stepped(mesh)
    same = [torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), again.parameters(), strict=True)]
    problems = [] if all(same) and len(same) == 4 else [f"gradients are equal: {same}"]
    return problems + ([] if torch.equal(plain.calls, again.calls) else [f"{again.calls} calls, not {plain.calls}"])


@over(2)
def test_a_part_that_does_not_repeat_itself_is_refused(rank: int, size: int) -> list[str]:
    try:
        stepped(init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)), differs=True)
    except (ValueError, RuntimeError) as error:
        text = "\n".join([str(error), *error.__notes__])
        return [] if "block 0 (Block) computes something else when a part of it is computed again" in text else [text]
    return ["not refused"]
