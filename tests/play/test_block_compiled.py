"""Blocks under ``torch.compile``: the engine leaves their graphs where it switches and queues."""

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b.engine import Engine, Microbatch, Stage, combined_forward_backward_step
from overlap1f1b.plan import Recompute
from overlap1f1b.schedule import build_schedule
from overlap1f1b.transport.calls import exchange
from tests import models
from tests.engines import COSTS, make
from tests.ranks import over
from tests.tiers import wide

MICROBATCHES = 3
Compile = Callable[[nn.Sequential, str], nn.Sequential]


def in_place(model: nn.Sequential, backend: str, **options: Any) -> nn.Sequential:
    for block in model[1:3]:  # with experts, and without
        block.compile(backend=backend, **options)
    return model


def wrapped(model: nn.Sequential, backend: str, **options: Any) -> nn.Sequential:
    middle = [torch.compile(block, backend=backend, **options) for block in model[1:3]]
    return nn.Sequential(model[0], *middle, *model[3:])


WAYS: list[Compile] = [in_place, wrapped]


class Hooked(models.Block):
    """A hook behind the experts that changes the gradient, in a part that the engine walks twice, and an autocast."""

    hooked = 0

    def around(self, experts: nn.Module, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
            y: Tensor = experts(tokens, indices, weights)
        if y.requires_grad:
            y.register_hook(self._halve)
        return y

    def _halve(self, grad: Tensor) -> Tensor:
        self.hooked += 1
        return grad * 0.5


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    torch._dynamo.reset()  # type: ignore[no-untyped-call]


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float((found[n] - grad).norm() / (grad.norm() + 1e-12)) for n, grad in expected.items())


def engine_of(model: nn.Sequential, **options: Any) -> Engine:
    program = build_schedule("zb_h1", microbatches=MICROBATCHES)
    return make(model, program, **{"costs": COSTS, "timeout": 60, "verify": False} | options)


@pytest.mark.parametrize(("compiled", "recompute"), [(in_place, "none"), (wrapped, "block")])
def test_gradients_are_those_of_the_plain_model_and_come_once(compiled: Compile, recompute: Recompute) -> None:
    data = models.batch(MICROBATCHES)
    found: list[dict[str, Tensor]] = []
    counts: list[tuple[int, ...]] = []
    for compiles in (False, True):
        model = models.build(layers=1, block=Hooked)
        calls: list[int] = []
        model[1].mix.weight.register_post_accumulate_grad_hook(lambda p, calls=calls: calls.append(1))
        if compiles:
            engine_of(compiled(model, "aot_eager"), recompute=recompute).step(data[0], target=data[1])
        else:
            models.plain_gradients(model, *data, MICROBATCHES)
        found.append(models.gradients(model))
        counts.append((len(calls), model[1].hooked))
    assert worst(found[1], found[0]) < 1e-6
    assert counts == [(MICROBATCHES,) * 2] * 2


@pytest.mark.parametrize("compiled", WAYS)
def test_a_block_runs_with_and_without_the_engine_in_turns(compiled: Compile) -> None:
    data = models.batch(MICROBATCHES)
    _, expected = models.plain_gradients(models.build(layers=1), *data, MICROBATCHES)
    model = models.build(layers=1)
    given = compiled(model, "eager")
    engine = engine_of(given)
    for turn in range(4):
        model.zero_grad()
        if turn % 2:
            engine.step(data[0], target=data[1])
        else:
            models.plain_gradients(given, *data, MICROBATCHES)
        assert worst(models.gradients(model), expected) < 1e-6


def test_weight_gradients_wait_for_their_own_node() -> None:
    x, y = models.batch(1)
    model = in_place(models.build(layers=1), "aot_eager")
    microbatch = Microbatch(Stage(model), x, y, loss_fn=models.loss_fn)
    combined_forward_backward_step(microbatch, None)
    combined_forward_backward_step(None, microbatch, split=True)
    assert model[1].mix.weight.grad is None
    assert model[1].experts[0].gate_up.grad is None
    microbatch.accumulate_weights()
    _, expected = models.plain_gradients(models.build(layers=1), x, y, 1)
    assert worst(models.gradients(model), expected) < 1e-6


COMPILES = shutil.which("g++") is not None
"""Whether inductor finds a compiler."""


@pytest.mark.parametrize(
    ("backend", "recompute", "calls"),
    [
        ("inductor" if COMPILES else "aot_eager", "none", 1),
        *wide(
            ("aot_eager", "none", 2),
            ("aot_eager", "block", 2),
            pytest.param("inductor", "block", 2, marks=pytest.mark.skipif(not COMPILES, reason="inductor needs g++")),
        ),
    ],
)
@over(2, timeout=300)
def test_two_ranks_equal_the_engine_without_it(
    rank: int, size: int, backend: str, recompute: Recompute, calls: int
) -> None:
    torch._dynamo.reset()  # type: ignore[no-untyped-call]
    mesh, data = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)), models.batch(MICROBATCHES, seed=rank)
    found = []
    for compiles in (False, True):
        model = models.build(mesh.get_group("ep"), layers=1, expert_calls=calls)
        given = wrapped(model, backend) if compiles else model
        engine_of(given, mesh=mesh, recompute=recompute).step(data[0], target=data[1])
        found.append(models.gradients(model))
    assert all(float(grad.norm()) for name, grad in found[0].items() if "mix" in name)
    assert worst(found[1], found[0]) < (2e-6 if backend == "inductor" else 1e-6)


@pytest.mark.parametrize("compiled", WAYS)
def test_a_whole_graph_is_refused_in_one_line(compiled: Any) -> None:
    given = compiled(models.build(layers=1), "eager", fullgraph=True)
    kind = type(given[1]).__name__
    with pytest.raises(ValueError, match="fullgraph") as caught:
        engine_of(given).step(*models.batch(MICROBATCHES))
    assert str(caught.value) == (
        f"block 1 ({kind}) is compiled with fullgraph=True, and calls experts or nn.Linear, where the engine leaves "
        "the graph; allowed: torch.compile without fullgraph"
    )


@pytest.mark.parametrize("compiled", WAYS)
@pytest.mark.parametrize(
    "options",
    [{"mode": "reduce-overhead"}, {"mode": "max-autotune"}, {"options": {"triton.cudagraphs": True}}, {}],
    ids=str,
)
def test_cuda_graphs_are_refused_where_several_microbatches_are_alive(compiled: Any, options: dict[str, Any]) -> None:
    """Nothing is compiled here: a sequential program goes on to the next check."""
    for name, several in {"combined_1f1b": True, "afab": True, "sequential": False}.items():
        with torch.device("meta"):
            model = models.build(layers=1)
        program = build_schedule(name, microbatches=MICROBATCHES)
        engine = make(compiled(model, "inductor", **options), program, costs=COSTS)
        with pytest.raises(ValueError, match="allowed") as caught:
            engine.step(*models.batch(MICROBATCHES))
        assert ("is compiled with triton.cudagraphs" in str(caught.value)) == (several and bool(options)), name


class Exchanging(nn.Module):
    """Exchanges rows by itself, and uses what it made before."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group, self.first, self.second = group, nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        y = torch.compiler.disable(exchange)(h, None, None, self.group)
        y = torch.compiler.disable(exchange)(torch.tanh(self.second(y)), None, None, self.group)
        return x + y * h.sigmoid()


@over(2, timeout=120)
def test_blocks_that_exchange_by_themselves(rank: int, size: int) -> None:
    torch._dynamo.reset()  # type: ignore[no-untyped-call]
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    data = torch.randn(2, 4 * MICROBATCHES, 12, generator=torch.Generator().manual_seed(rank))
    found: list[dict[str, Tensor]] = []
    for compiles in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(*[Exchanging(mesh.get_group("ep")) for _ in range(2)])
        for block in model if compiles else ():
            block.compile(backend="aot_eager")
        program = build_schedule("combined_1f1b", microbatches=MICROBATCHES)
        engine = make(model, program, mesh=mesh, loss_fn=nn.MSELoss(), costs=COSTS, reduce=False, timeout=60)
        with pytest.warns(UserWarning, match="does nothing in an engine") if compiles else nullcontext():
            for _ in range(3):
                model.zero_grad()
                engine.step(data[0], target=data[1])
                found.append(models.gradients(model))
    problems = [name for other in found[1:] for name in models.equal(found[0], other)]
    assert not problems, problems
