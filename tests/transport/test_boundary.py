"""What passes between stages of different ranks."""

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from overlap1f1b.engine import Engine
from overlap1f1b.schedule import Kind, build_schedule
from overlap1f1b.transport.boundary import Spec, encode, specs_of
from tests.engines import COSTS, make
from tests.ranks import Ranks, over
from tests.tiers import wide

H = 6


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


def engine_over(mesh: DeviceMesh, name: str, microbatches: int, **options: Any) -> tuple[Engine, nn.ModuleList]:
    """An engine, and its blocks."""
    program, blocks = build_schedule(name, ranks=mesh.size(), microbatches=microbatches), build()
    options = {"costs": COSTS, "timeout": 20, "loss_fn": lambda loss: loss} | options
    return make(blocks, program, mesh=mesh, **options), nn.ModuleList(blocks)


def stepped(engine: Engine, blocks: nn.ModuleList, sizes: list[int], seed: int) -> list[str]:
    """What differs from one process after a step, before which an evaluation with other sizes passes."""
    parts, targets = batch(sizes, seed), [()] * len(sizes)
    losses, expected = plain(build(), parts)
    blocks.zero_grad()
    engine.evaluate(list(batch([1] * len(sizes), seed=9)), target=targets)
    result = engine.step(list(parts), target=targets)
    held = set(engine.parameters())
    problems = [
        label
        for label, p in blocks.named_parameters()
        if p in held and (p.grad is None or not torch.equal(p.grad, expected[label]))
    ]
    return problems if not result.losses or [float(x) for x in result.losses] == losses else [*problems, "losses"]


@pytest.mark.parametrize("dynamic", [False, *wide(True)])
@pytest.mark.parametrize("name", ["1f1b", *wide("zb_h1", "interleaved_1f1b", "dualpipev")])
@over(2)
def test_several_tensors_of_changing_sizes(rank: int, size: int, name: str, dynamic: bool) -> None:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("pp",))
    engine, blocks = engine_over(mesh, name, 5, dynamic_shapes=dynamic)
    second = [2, 2, 5, 1, 1] if dynamic else [3, 4, 1, 7, 2]
    problems = stepped(engine, blocks, [3, 4, 1, 7, 2], 0) + stepped(engine, blocks, second, 1)
    assert not problems, problems


def _resized(rank: int, size: int) -> str:
    engine, _ = engine_over(init_device_mesh("cpu", (size,), mesh_dim_names=("pp",)), "1f1b", 2, timeout=5)
    engine.step(list(batch([3, 3], 0)), target=[()] * 2)
    with pytest.raises((ValueError, RuntimeError)) as refused:
        engine.step(list(batch([3, 4], 0)), target=[()] * 2)
    return str(refused.value)


def test_other_sizes_need_dynamic_shapes(ranks2: Ranks) -> None:
    first, second = ranks2.run(_resized)
    assert "stage 0 passes on float32[2, 4, 6]" in first
    assert "in the first step float32[2, 3, 6]" in first
    assert "stage 0 passes on float32[2, 4, 6]" in second
    ranks2.close()  # what was under way is lost with the ranks


@over(2)
def test_two_engines_take_turns(rank: int, size: int) -> None:
    """Two engines over one mesh, their steps in turn."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("pp",))
    both = [engine_over(mesh, name, 4) for name in ("1f1b", "zb_v")]
    problems = [name for _ in range(2) for engine, blocks in both for name in stepped(engine, blocks, [3] * 4, 1)]
    assert not problems, problems


@pytest.mark.parametrize("dynamic", [False, *wide(True)])
@over(2)
def test_each_transfer_is_timed_where_it_arrives(rank: int, size: int, dynamic: bool) -> None:
    forward, backward = Kind.F, Kind.I
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("pp",))
    for name, arrived in {
        "1f1b": [[(backward, 1)], [(forward, 0)]],
        "dualpipev": [[(forward, 2), (backward, 1)], [(forward, 0), (backward, 3)]],  # stages 0 and 3 are on rank 0
        "dualpipe": [[(forward, 0), (backward, 1)]] * 2,
    }.items():
        engine, _ = engine_over(mesh, name, 4, dynamic_shapes=dynamic)
        engine.step(list(batch([3, 4, 1, 7], seed=1)), target=[()] * 4)
        took = engine.connection.boundary.timed()
        assert all(0 < seconds < 20 for seconds in took.values())
        engine.step(list(batch([3, 4, 1, 7], seed=1)), target=[()] * 4)
        assert sorted((kind, stage) for _, kind, stage, *_ in took) == arrived[rank]
