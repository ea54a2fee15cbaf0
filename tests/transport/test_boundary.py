"""What passes between stages of different ranks."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b.engine import Engine, EngineOptions
from overlap1f1b.plan import NodeCosts
from overlap1f1b.schedule import Kind, build_schedule
from overlap1f1b.transport.boundary import Spec, encode, specs_of
from tests.ranks import Ranks

H = 6
COSTS = NodeCosts.uniform(attention=3, experts=4, dispatch=5, dense=1, send=1)


def test_headers_carry_what_tensors_look_like() -> None:
    tensors = (torch.zeros(2, 3), torch.zeros((), dtype=torch.int64), torch.zeros(0, 5, 1, dtype=torch.bfloat16))
    specs = specs_of(tensors, (True, False, True))
    assert specs[1] == Spec(torch.int64, False, ())
    assert pickle.loads(encode(specs).numpy().tobytes()) == specs
    assert pickle.loads(encode(()).numpy().tobytes()) == ()
    with pytest.raises(ValueError, match="17 tensors between stages; allowed: up to 16"):
        specs_of([torch.zeros(1)] * 17, [False] * 17)
    with pytest.raises(ValueError, match="9 dimensions between stages; allowed: up to 8"):
        specs_of([torch.zeros((1,) * 9)], [False])


class Encoder(nn.Module):
    """Two streams in, three out: a mask of integers passes through, one stream is passed on as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(H, H), nn.Linear(H, H)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.tanh(self.a(x)) * mask[..., None]
        return x, memory + self.b(x), mask


class PassThrough(nn.Module):
    """One tensor returned as it is, another that requires no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(H, H)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, memory + self.a(x.detach()), mask


class Sum(nn.Module):
    """Its output's gradient has stride 0."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(H, H)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        return (self.a(memory) * mask[..., None]).sum() + x.sum()


def build() -> list[nn.Module]:
    torch.manual_seed(3)
    return [Encoder(), Encoder(), PassThrough(), Encoder(), Sum()]


def plain(blocks: list[nn.Module], parts: list[tuple[Tensor, ...]]) -> tuple[list[float], dict[str, Tensor]]:
    model, losses = nn.ModuleList(blocks), []
    for part in parts:
        x: Any = part
        for block in model:
            x = block(*x)
        (x / len(parts)).backward()
        losses.append(float(x.detach()))
    return losses, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def batch(sizes: list[int], seed: int) -> list[tuple[Tensor, ...]]:
    g = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(2, n, H, generator=g), torch.randn(2, n, H, generator=g), torch.randint(0, 2, (2, n), generator=g))
        for n in sizes
    ]


def _streams(rank: int, size: int, name: str, dynamic: bool) -> list[str]:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("pp",))
    program = build_schedule(name, ranks=size, microbatches=5)
    blocks, problems = build(), []
    engine = Engine(
        blocks,
        program,
        mesh=mesh,
        loss_fn=lambda loss: loss,
        options=EngineOptions(costs=COSTS, dynamic_shapes=dynamic, timeout=20),
    )
    for step, sizes in enumerate(([3, 4, 1, 7, 2], [2, 2, 5, 1, 1] if dynamic else [3, 4, 1, 7, 2])):
        parts = batch(sizes, seed=step)
        losses, expected = plain(build(), parts)
        for parameter in engine.parameters():
            parameter.grad = None
        # Between training steps an evaluation with other sizes passes.
        engine.evaluate(list(batch([1] * 5, seed=9)), target=[()] * 5)
        result = engine.step(list(parts), target=[()] * 5)
        held = set(engine.parameters())
        for label, parameter in nn.ModuleList(blocks).named_parameters():
            if parameter in held:
                grad = parameter.grad
                if grad is None or not torch.equal(grad, expected[label]):
                    problems.append(f"step {step}: {label} differs")
        if result.losses and [float(x) for x in result.losses] != losses:
            problems.append(f"step {step}: losses differ")
    return problems


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "interleaved_1f1b", "dualpipev"])
def test_several_tensors_of_changing_sizes(ranks2: Ranks, name: str, dynamic: bool) -> None:
    assert ranks2.run(_streams, name, dynamic) == [[], []]


def _resized(rank: int, size: int) -> str:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("pp",))
    program = build_schedule("1f1b", ranks=size, microbatches=2)
    engine = Engine(
        build(), program, mesh=mesh, loss_fn=lambda loss: loss, options=EngineOptions(costs=COSTS, timeout=5)
    )
    engine.step(list(batch([3, 3], 0)), target=[()] * 2)
    try:
        engine.step(list(batch([3, 4], 0)), target=[()] * 2)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def test_other_sizes_need_dynamic_shapes(ranks2: Ranks) -> None:
    first, second = ranks2.run(_resized)
    assert "stage 0 passes on float32[2, 4, 6]" in first
    assert "in the first step float32[2, 3, 6]" in first
    assert "stage 0 passes on float32[2, 4, 6]" in second
    ranks2.close()  # what was under way is lost with the ranks


def _two_engines(rank: int, size: int) -> list[bool]:
    """Two engines over one mesh, their steps in turn, one evaluated in between."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("pp",))
    parts, same = batch([3] * 4, 1), []
    _, expected = plain(build(), parts)
    models = [build(), build()]
    engines = [
        Engine(
            m,
            build_schedule(n, ranks=size, microbatches=4),
            mesh=mesh,
            loss_fn=lambda loss: loss,
            options=EngineOptions(timeout=20),
        )
        for m, n in zip(models, ("1f1b", "zb_v"), strict=True)
    ]
    for _ in range(3):
        for engine, model in zip(engines, models, strict=True):
            for parameter in engine.parameters():
                parameter.grad = None
            engine.step(list(parts), target=[()] * 4)
            engine.evaluate(list(parts), target=[()] * 4)
            held = set(engine.parameters())
            same += [
                p.grad is not None and torch.equal(p.grad, expected[n])
                for n, p in nn.ModuleList(model).named_parameters()
                if p in held
            ]
    return same


def test_two_engines_take_turns(ranks2: Ranks) -> None:
    assert all(all(same) and same for same in ranks2.run(_two_engines))


def _timed(rank: int, size: int, name: str, dynamic: bool) -> list[tuple[Kind, int]]:
    """Transfers that this rank has received and timed behind a step."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("pp",))
    program = build_schedule(name, ranks=size, microbatches=4)
    engine = Engine(
        build(),
        program,
        mesh=mesh,
        loss_fn=lambda loss: loss,
        options=EngineOptions(costs=COSTS, dynamic_shapes=dynamic, timeout=20),
    )
    engine.step(list(batch([3, 4, 1, 7], seed=1)), target=[()] * 4)
    took = engine.boundary.timed()
    assert all(0 < seconds < 20 for seconds in took.values())
    engine.step(list(batch([3, 4, 1, 7], seed=1)), target=[()] * 4)
    return sorted((kind, stage) for _, kind, stage, *_ in took)


@pytest.mark.parametrize("dynamic", [False, True])
def test_each_transfer_is_timed_where_it_arrives(ranks2: Ranks, dynamic: bool) -> None:
    forward, backward = Kind.F, Kind.I
    assert ranks2.run(_timed, "1f1b", dynamic) == [[(backward, 1)], [(forward, 0)]]
    v = [[(forward, 2), (backward, 1)], [(forward, 0), (backward, 3)]]  # stages 0 and 3 are on rank 0
    assert ranks2.run(_timed, "dualpipev", dynamic) == v
    both = [[(forward, 0), (backward, 1)]] * 2
    assert ranks2.run(_timed, "dualpipe", dynamic) == both
