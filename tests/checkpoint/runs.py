"""Runs that checkpoints hold: a small model with an optimizer, and a training with dropout and a dataloader."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim.lr_scheduler import OneCycleLR

from overlap1f1b.checkpoint import load_checkpoint, save_checkpoint
from overlap1f1b.engine import Engine
from overlap1f1b.moe import Experts
from overlap1f1b.schedule import build_schedule
from tests import models
from tests.engines import COSTS, make

EXPERTS = 4
CONFIG = {"hidden": 5, "sizes": (3, 2)}

State = dict[str, Tensor]


class Dense(nn.Linear):
    """A linear map with a frozen parameter and a buffer."""

    seen: Tensor

    def __init__(self, hidden: int, source: torch.Generator) -> None:
        super().__init__(hidden, 3)
        nn.init.normal_(self.weight, generator=source)
        nn.init.normal_(self.bias, generator=source)
        self.frozen = nn.Parameter(torch.randn(2, generator=source), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))


class Slice(Experts):
    """Experts of one parameter, of which a rank has a slice."""

    def __init__(self, group: Any, source: torch.Generator) -> None:
        super().__init__()
        self.share(EXPERTS, group)
        self.mine = slice(self.exchange.rank * self.local_experts, (self.exchange.rank + 1) * self.local_experts)
        self.weight = nn.Parameter(torch.randn(EXPERTS, 3, 2, generator=source)[self.mine])


class Tiny(nn.Sequential):
    """A dense block and a slice of experts, with an optimizer of both."""

    def __init__(self, devices: DeviceMesh | None = None, *, hidden: int = 5, seed: int = 0) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(seed)
        self.devices = devices
        self.dense = Dense(hidden, source)
        self.experts = Slice(None if devices is None else devices.get_group("ep"), source)
        self.adamw = torch.optim.AdamW([self.experts.weight, self.dense.weight, self.dense.bias], lr=0.1)

    def train_steps(self, first: int, count: int) -> Tiny:
        """AdamW steps with gradients that are a function of the step alone."""
        for step in range(first, first + count):
            source = torch.Generator().manual_seed(100 + step)
            for parameter in (self.dense.weight, self.dense.bias):
                parameter.grad = torch.randn(parameter.shape, generator=source)
            grad = torch.randn(EXPERTS, 3, 2, generator=source)
            self.experts.weight.grad = grad[self.experts.mine].contiguous()
            self.adamw.step()
            self.dense.seen += 1
        return self

    def state(self) -> State:
        """Everything that a checkpoint must bring back."""
        moments = {
            f"{name}.{entry}": value
            for name, parameter in self.named_parameters()
            for entry, value in self.adamw.state.get(parameter, {}).items()
        }
        return {name: tensor.detach().clone() for name, tensor in (self.state_dict() | moments).items()}

    def engine(self) -> Engine:
        program = build_schedule("sequential", ranks=1, microbatches=1)
        return make(self, program, mesh=self.devices, loss_fn=torch.mean, timeout=30.0)

    def save(self, folder: Path, step: int, **options: Any) -> Path:
        return save_checkpoint(self.engine(), folder, step, self.adamw, **({"config": CONFIG} | options)).result()

    def load(self, path: Path | None, config: dict[str, Any] = CONFIG) -> int:
        return load_checkpoint(self.engine(), path, self.adamw, config=config)


def joined(slices: list[State]) -> State:
    """The state of one rank that holds all experts, of the states of several."""
    whole = dict(slices[0])
    for key, value in whole.items():
        if key.startswith("experts") and value.ndim:
            whole[key] = torch.cat([one[key] for one in slices])
        else:
            assert all(torch.equal(one[key], value) for one in slices), key
    return whole


def ep(size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))


def save_on(rank: int, size: int, folder: Path) -> State:
    """The state of a trained Tiny that ranks save as step 3."""
    model = Tiny(ep(size)).train_steps(0, 3)
    model.save(folder, 3)
    return model.state()


def load_on(rank: int, size: int, folder: Path) -> State:
    """The state of a Tiny that has loaded step 3."""
    model = Tiny(ep(size), seed=1)
    assert model.load(folder) == 3
    return model.state()


class Loader:
    """Batches in an order of its own on each shard of the data."""

    def __init__(self, shard: int) -> None:
        self.source, self.served = torch.Generator().manual_seed(shard), 0

    def __next__(self) -> tuple[Tensor, Tensor]:
        self.served += 1
        rows = torch.randint(models.V, (2, 4, 8), generator=self.source)
        return rows[0], rows[1]

    def state_dict(self) -> dict[str, Any]:
        return {"source": self.source.get_state(), "served": self.served}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.source.set_state(state["source"])
        self.served = state["served"]


def placed(layout: dict[str, int]) -> tuple[DeviceMesh | None, dist.ProcessGroup | None, int]:
    """A mesh, the ranks that share experts, and the number of this rank's shard of the data; over no ranks none."""
    if not layout:
        return None, None, 0
    mesh = init_device_mesh("cpu", tuple(layout.values()), mesh_dim_names=tuple(layout))
    at = dict(zip(layout, mesh.get_coordinate() or (), strict=True))
    group = mesh.get_group("ep") if layout.get("ep", 1) > 1 else None
    return mesh, group, at.get("dp", 0) * layout.get("ep", 1) + at.get("ep", 0)


class Watching(models.Block):
    """A block with running statistics: a rank's are those of its own rows."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.watch = nn.BatchNorm1d(models.H)
        self.most = nn.Buffer(torch.zeros(models.H, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        self.most = torch.maximum(self.most, x.detach().flatten(0, 1).amax(0).bfloat16())
        return self.watch(super().forward(x).flatten(0, 1)).view_as(x)


class Run:
    """Training with dropout, a schedule of the learning rate, and numbers of Python and NumPy in every batch."""

    def __init__(self, layout: dict[str, int], *, seed: int = 0) -> None:
        mesh, group, shard = placed(layout)
        model = models.build(group, layers=2, dropout=0.3, block=Watching)
        program = build_schedule("1f1b", ranks=layout.get("pp", 1), microbatches=2)
        self.engine = make(model, program, mesh=mesh, costs=COSTS, timeout=30.0)
        self.optimizer = torch.optim.AdamW(self.engine.parameters())
        self.scheduler = OneCycleLR(self.optimizer, max_lr=0.1, total_steps=20)
        self.loader = Loader(shard)
        data = sum(layout.get(name, 1) - 1 for name in ("dp", "ep")) and shard
        for seeded in (torch.manual_seed, random.seed, np.random.seed):
            seeded(seed + 10 * data)

    @property
    def state(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler, "loader": self.loader}

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            inputs, target = next(self.loader)
            inputs = (inputs + random.randrange(5) + np.random.randint(5)) % models.V
            losses.append(self.engine.mean_loss(self.engine.step(inputs, target=target)))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
        return losses

    def whole(self) -> dict[str, Any]:
        """Everything that goes on."""
        found: dict[str, Any] = {"rates": [group["lr"] for group in self.optimizer.param_groups]}
        found |= self.buffers()
        for n, p in enumerate(self.engine.parameters()):
            found[f"{n}"] = p.detach().clone()
            found |= {
                f"{n}.{entry}": torch.as_tensor(value).clone() for entry, value in self.optimizer.state[p].items()
            }
        return found

    def buffers(self) -> State:
        """Those of this rank, by their names in the model."""
        held = {block for stage in self.engine.stages.values() for block in stage.blocks}
        blocks = [(n, block) for n, block in enumerate(self.engine.model) if block in held]
        return {f"{n}.{name}": buffer.clone() for n, block in blocks for name, buffer in block.named_buffers()}

    def save(self, folder: Path, step: int = 3, **options: Any) -> Any:
        return save_checkpoint(self.engine, folder, step, self.optimizer, **({"state": self.state} | options))

    def load(self, folder: Path, **options: Any) -> int:
        return load_checkpoint(self.engine, folder, self.optimizer, **({"state": self.state} | options))


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[key], other[key]) if isinstance(one[key], Tensor) else one[key] == other[key] for key in one
    )
