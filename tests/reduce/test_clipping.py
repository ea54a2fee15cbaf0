"""The norm over the whole model, the weights of microbatches, and factors of the loss."""

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor, distribute_tensor

from overlap1f1b.engine import Engine
from overlap1f1b.schedule import build_schedule
from tests import models
from tests.engines import COSTS, make
from tests.ranks import over
from tests.tiers import wide

IGNORED = -100


def token_mean(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED)


def tokens(target: Tensor) -> int:
    return int((target != IGNORED).sum())


def ragged(microbatches: int, seed: int) -> tuple[Tensor, Tensor]:
    """A batch whose microbatches count for different numbers of tokens, the second for none."""
    inputs, target = models.batch(microbatches, seed=seed)
    for row in range(len(target)):
        target[row, : (row * 5 + seed) % 7] = IGNORED
    target[2:4] = IGNORED
    return inputs, target


def parts(inputs: Tensor, target: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The microbatches that count."""
    return [(x, y) for x, y in zip(inputs.chunk(4), target.chunk(4), strict=True) if tokens(y)]


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ((2, 1, 2), "dualpipe"),
        *wide(((2, 2, 1), "dualpipev"), ((1, 2, 2), "zb_h1"), ((2, 2, 1), "combined_1f1b"), ((2, 2, 2), "dualpipe")),
    ],
)
@over(lambda shape, _: math.prod(shape), timeout=180)
def test_tokens_norm_and_scale(rank: int, size: int, shape: tuple[int, int, int], name: str) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "ep"))
    at = mesh.get_coordinate()
    program = build_schedule(name, ranks=shape[0], microbatches=4)
    data = [ragged(4, seed) for seed in range(shape[1] * shape[2])]
    total = sum(tokens(target) for _, target in data)
    whole = models.build(layers=4)
    for inputs, target in data:
        for x, y in parts(inputs, target):
            (3.0 * token_mean(whole(x), y) * tokens(y) / total).backward()
    blocks = list(models.build(mesh.get_group("ep"), layers=4))
    engine = make(blocks, program, mesh=mesh, loss_fn=token_mean, count_tokens=tokens, costs=COSTS, timeout=30)
    inputs, target = data[at[1] * shape[2] + at[2]]
    result = engine.step(inputs, target=target, loss_scale=3.0, return_outputs=True)
    problems = differences(engine, blocks, whole, at[2], shape[2])
    if result.losses and [tuple(o.shape) for o in result.outputs] != [(2, 7, models.V)] * len(result.losses):
        problems.append("outputs are not the logits")
    mean = engine.mean_loss(result)
    with torch.no_grad():
        expected = sum(
            float(token_mean(whole(x), y)) * tokens(y) / total
            for inputs, target in data
            for x, y in parts(inputs, target)
        )
    if abs(mean - expected) > 1e-5:
        problems.append(f"mean loss {mean}, expected {expected}")
    for norm_type in (math.inf, 3.0, 2.0):
        norm = engine.clip_gradients(0.1, norm_type)
        reference = nn.utils.clip_grad_norm_(whole.parameters(), 0.1, norm_type)
        if abs(float(norm) / float(reference) - 1) > 1e-5:
            problems.append(f"norm {norm} of type {norm_type}, expected {reference}")
    problems += differences(engine, blocks, whole, at[2], shape[2])
    assert not problems, problems


def differences(
    engine: Engine, blocks: Iterable[nn.Module], whole: nn.Module, rank: int = 0, size: int = 1
) -> list[str]:
    """Gradients that are not those of one process; each of ``size`` ranks has a part of the experts."""
    return models.apart(models.held(engine, nn.Sequential(*blocks)), models.gradients(whole), rank, size, 1e-5)


class Autocast(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *x: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(*x)


@over(2)
def test_autocast_around_a_step(rank: int, size: int) -> None:
    """bf16 autocast around a step: the forwards' alone, as torch advises for a plain loop."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("pp",))
    inputs, target = models.batch(4)
    whole, blocks = models.build(layers=2), models.build(layers=2)
    for x, y in zip(inputs.chunk(4), target.chunk(4), strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            loss = models.loss_fn(whole(x), y) / 4
        loss.backward()
    program = build_schedule("zb_h1", ranks=size, microbatches=4)
    engine = make(blocks, program, mesh=mesh, costs=COSTS, timeout=20)
    with torch.autocast("cpu", torch.bfloat16):
        engine.step(inputs, target=target)
    problems = differences(engine, blocks, whole)
    assert not problems, problems


@over(2)
def test_autocast_over_stages(rank: int, size: int) -> None:
    """bf16 autocast inside blocks: the same numbers as in one process, whatever passes between ranks is bf16."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("pp",))
    inputs, target = models.batch(4)
    whole = nn.Sequential(*map(Autocast, models.build(layers=2)))
    models.plain_gradients(whole, inputs, target, 4)
    blocks: list[nn.Module] = [Autocast(block) for block in models.build(layers=2)]
    engine = make(blocks, build_schedule("1f1b", ranks=size, microbatches=4), mesh=mesh, costs=COSTS)
    engine.step(inputs, target=target)
    mine, expected = models.held(engine, nn.Sequential(*blocks)), models.gradients(whole)
    assert mine
    problems = models.equal(mine, {name: expected[name] for name in mine})
    assert not problems, problems


@pytest.mark.parametrize("name", ["zb_h1", *wide("1f1b")])
@pytest.mark.parametrize("frozen", [range(3), *wide(range(3, 6), range(1, 4))])
@over(2)
def test_frozen_stages(rank: int, size: int, name: str, frozen: range) -> None:
    """Blocks without a gradient, perhaps all that a rank holds."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("pp",))
    program = build_schedule(name, ranks=size, microbatches=5)
    inputs, target = models.batch(5)
    whole, blocks = (models.build(layers=3) for _ in range(2))
    for index in frozen:
        whole[index].requires_grad_(False)
        blocks[index].requires_grad_(False)
    models.plain_gradients(whole, inputs, target, 5)
    engine = make(blocks, program, mesh=mesh, costs=COSTS, timeout=20)
    engine.step(inputs, target=target)
    norm, reference = engine.clip_gradients(0.1), nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
    torch.testing.assert_close(norm, reference)
    problems = differences(engine, blocks, whole)
    assert not problems, problems


def test_a_frozen_model_is_evaluated_and_not_trained() -> None:
    data, model = models.batch(2), models.build().requires_grad_(False)
    engine = make(model, build_schedule("sequential", microbatches=2), costs=COSTS)
    assert float(engine.evaluate(data[0], target=data[1]).loss) == pytest.approx(
        float(models.loss_fn(model(data[0]), data[1])), rel=1e-5
    )
    with pytest.raises(ValueError, match="no parameter of the model requires a gradient"):
        engine.step(data[0], target=data[1])


def test_a_norm_is_as_precise_as_the_gradients() -> None:
    model, plain = models.build().double(), models.build().double()
    engine = make(model, build_schedule("sequential", microbatches=2), costs=COSTS)
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        parameter.grad = torch.randn_like(parameter)
        other.grad = parameter.grad.clone()
    norm, reference = engine.clip_gradients(0.1), nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    torch.testing.assert_close(norm, reference, rtol=1e-14, atol=0.0)
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-14, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_norm_is_summed_in_float32_at_least(dtype: torch.dtype) -> None:
    """Sixteen bits are too few for a sum over parameters."""
    model = models.build()
    engine = make(model, build_schedule("sequential", microbatches=2), costs=COSTS)
    for parameter in model.to(dtype).parameters():
        parameter.grad = torch.randn_like(parameter)
    exact = sum(float(p.grad.double().square().sum()) for p in model.parameters()) ** 0.5  # type: ignore[union-attr]
    assert float(engine.clip_gradients(1e9)) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("ranks", [2, 4], ids=["whole", "shards"])
@over(lambda ranks: ranks)
def test_a_norm_is_the_same_number_on_stages_of_any_precision(rank: int, size: int, ranks: int) -> None:
    """One stage is float32, the other float64, with gradients far apart in size."""
    dp = size // 2
    layout = {"pp": 2, "dp": dp}
    mesh = init_device_mesh("cpu", tuple(layout.values()), mesh_dim_names=tuple(layout))
    blocks = [nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False).double()]
    for block in blocks if dp > 1 else []:
        fully_shard(block, mesh=mesh["dp"])
    program = build_schedule("1f1b", ranks=2, microbatches=2)
    engine = make(blocks, program, mesh=mesh, costs=COSTS, timeout=20)
    grads = [torch.full((3, 3), 2.0**-40), torch.arange(9, dtype=torch.float64).view(3, 3) / 7 + 0.1]
    mine = grads[mesh.get_local_rank("pp")]
    for parameter in engine.parameters():
        if isinstance(parameter, DTensor):
            parameter.grad = distribute_tensor(mine, parameter.device_mesh, parameter.placements)
        else:
            parameter.grad = mine.clone()
    norm = engine.clip_gradients(1e9)
    exact = sum(float(grad.double().square().sum()) for grad in grads) ** 0.5
    assert norm.dtype == torch.float64
    assert float(norm) == pytest.approx(exact, rel=1e-15)


def test_no_token_at_all_is_refused() -> None:
    model, (inputs, target) = models.build(), models.batch(2)
    engine = make(
        model, build_schedule("sequential", microbatches=2), loss_fn=token_mean, count_tokens=tokens, costs=COSTS
    )
    with pytest.raises(ValueError, match="count_tokens gives 0 for the whole batch; allowed: 1 or more"):
        engine.step(inputs, target=torch.full_like(target, IGNORED))
    for wrong in (-1.0, math.nan, "1", True, None):
        with pytest.raises(ValueError, match=f"^max_norm={wrong!r}; allowed: 0 or more$"):
            engine.clip_gradients(wrong)  # type: ignore[arg-type]
    for norm_type, said in ((0, "0"), ("abc", "'abc'"), ("2", "'2'"), (True, "True"), (None, "None")):
        with pytest.raises(ValueError, match=f"norm_type={said}; allowed: more than 0, math.inf for the largest"):
            engine.clip_gradients(1.0, norm_type)  # type: ignore[arg-type]
    engine.clip_gradients(1.0)  # a wrong value ends no engine


def test_the_largest_gradient_may_be_undefined() -> None:
    model = models.build()
    engine = make(model, build_schedule("sequential", microbatches=2), costs=COSTS)
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, math.nan if index == 1 else 1.0)
    assert math.isnan(engine.clip_gradients(1.0, "inf"))  # type: ignore[arg-type]


@over(2)
def test_gradients_are_scaled_and_a_step_is_left_out_on_all_ranks(rank: int, size: int) -> None:
    """A gradient that is infinite on one stage alone makes all ranks leave that step out."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "ep"))
    blocks, whole = list(models.build(mesh.get_group("ep"), layers=2)), models.build(layers=2)
    engine = make(blocks, build_schedule("1f1b", ranks=2, microbatches=2), mesh=mesh, costs=COSTS)
    data = models.batch(2)
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.5)
    scaler = ShardedGradScaler("cpu", init_scale=1024.0)
    for overflows in (True, False):
        engine.step(data[0], target=data[1], loss_scale=float(scaler.scale(torch.ones(()))))
        if overflows and rank == 1:
            next(engine.parameters()).grad.view(-1)[0] = torch.inf  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    models.plain_gradients(whole, *data, 2)
    torch.optim.SGD(whole.parameters(), lr=0.5).step()
    assert scaler.get_scale() == 512.0, scaler.get_scale()
    held = set(engine.parameters())
    for (name, mine), theirs in zip(nn.Sequential(*blocks).named_parameters(), whole.parameters(), strict=True):
        assert mine not in held or torch.allclose(mine, theirs, rtol=1e-5, atol=1e-7), name
