"""The first step of a plan is compared with a plain loop, and leaves what one step leaves."""

import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from overlap1f1b.engine import Engine, carried
from overlap1f1b.learn.check import VerificationError
from overlap1f1b.learn.memory import peak_bytes
from overlap1f1b.moe import MoE, RouterConfig
from overlap1f1b.plan import NodeCosts, Overlap
from overlap1f1b.schedule import Action, Kind, Placement, build_schedule
from overlap1f1b.schedule.program import program_of
from tests import models, observing
from tests.campaign.hidden import Block
from tests.campaign.places import Shared
from tests.engines import COSTS, make
from tests.play.plain import HIDDEN, MICROBATCHES, batch, engine_of, loss_fn
from tests.ranks import Ranks, over
from tests.tiers import wide


@pytest.mark.parametrize("place", ["another class", *wide("another file's global")])
@over(2)
def test_what_a_block_names_is_carried(rank: int, size: int, place: str) -> None:
    """What lies where the engine does not look is carried when the block says so."""
    mesh, holder = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)), {"another class": Shared}.get(place)
    data = torch.randn(2, 5 * MICROBATCHES, 8, generator=torch.Generator().manual_seed(rank))
    grads = []
    for overlap in ("serial", 3):
        torch.manual_seed(5)
        model = nn.Sequential(*(Block(mesh.get_group("ep"), place, "behind") for _ in range(2)))
        for block in model:
            carried(block, holder or sys.modules["hidden_beside"])
        engine_of(model, mesh, overlap=overlap).step(data[0], target=data[1])
        grads.append(models.gradients(model))
    problems = models.equal(*grads)
    assert not problems, problems


class Noted(nn.Module):
    """Draws from every generator, counts in every way, and has buffers that change."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.moe = MoE(hidden, 16, RouterConfig(4, 2, score="sigmoid"))
        self.norm, self.dropout = nn.BatchNorm1d(hidden), nn.Dropout(0.2)
        self.generator, self.calls, self.seen = torch.Generator().manual_seed(3), 0, list[int]()
        self.average = torch.zeros(hidden)
        self.by_name = {"calls": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(len(x))
        self.by_name["calls"] += 1
        self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        random.random()
        np.random.rand()
        torch.rand(1, generator=self.generator)
        y: Tensor = self.moe(self.dropout(self.norm(x)))
        return x + y


def _after(verify: bool, overlap: Overlap, *, grads: str) -> dict[str, Any]:
    """Return all that two steps and an evaluation leave."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    model = nn.Sequential(Noted(), Noted())
    for parameter in model.parameters():
        if grads == "main_grad":
            parameter.main_grad = torch.ones_like(parameter)  # type: ignore[attr-defined]
        elif grads:
            parameter.grad = torch.full_like(parameter, float(grads))
    program = build_schedule("combined_1f1b", microbatches=MICROBATCHES)
    engine = make(model, program, loss_fn=loss_fn, overlap=overlap, costs=COSTS, verify=verify)
    data = batch(0)
    losses = [engine.step(data[0], target=data[1]).loss for _ in range(2)]
    losses.append(engine.evaluate(data[0], target=data[1]).loss)
    left: dict[str, Any] = {name: buffer.clone() for name, buffer in model.named_buffers()}
    left |= {f"grad of {name}": p.grad for name, p in model.named_parameters()}
    left |= {f"main_grad of {name}": getattr(p, "main_grad", None) for name, p in model.named_parameters()}
    for number, block in enumerate(model):
        left |= {f"{number} {name}": getattr(block, name) for name in ("calls", "seen", "average", "by_name")}
        left[f"{number} generator"] = block.generator.get_state()
    numbers = (torch.get_rng_state(), random.random(), np.random.rand())
    return left | dict(zip(("torch", "python", "numpy"), numbers, strict=True)) | {"losses": torch.stack(losses)}


@pytest.mark.parametrize("grads", ["", "0.5", "main_grad"])
def test_it_leaves_what_one_step_leaves(grads: str) -> None:
    without, with_it = _after(False, "serial", grads=grads), _after(True, 3, grads=grads)
    for name, value in without.items():
        same = torch.equal(value, with_it[name]) if isinstance(value, Tensor) else value == with_it[name]
        assert same, name


def _refused(rank: int, size: int, place: str, when: str, overlap: Overlap, evaluates: bool) -> str:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    torch.manual_seed(5)
    blocks = [Block(mesh.get_group("ep"), place, when) for _ in range(2)]
    blocks[1].before = blocks[0].get
    for parameter in (p for block in blocks for p in block.parameters()):
        parameter.grad = torch.full_like(parameter, 0.25)
    engine = engine_of(nn.Sequential(*blocks), mesh, overlap=overlap)
    data = torch.randn(2, 5 * MICROBATCHES, blocks[0].mix.in_features, generator=torch.Generator().manual_seed(rank))
    with pytest.raises(VerificationError) as caught:
        (engine.evaluate if evaluates else engine.step)(data[0], target=data[1])
    assert all((p.grad == 0.25).all() for block in blocks for p in block.parameters()), "as before the step"
    with pytest.raises(RuntimeError, match="failed before"):
        engine.step(data[0], target=data[1])
    return str(caught.value).splitlines()[0]


@pytest.mark.parametrize(
    ("place", "when", "overlap", "evaluates", "said"),
    [
        ("a closure", "behind", 2, False, "a plain loop, the grad of experts.gate_up of block 0 (Block) of stage 0 by"),
        *wide(
            ("a weak dict", "behind", 3, True, "a plain loop, loss 0 by"),
            (
                "a tensor in place",
                "backward",
                3,
                False,
                "a plain loop, the grad of mix.weight of block 0 (Block) of stage 0 by",
            ),
            ("a function", "later", 3, False, "a plain loop, the grad of"),
        ),
    ],
)
def test_a_difference_ends_the_step_in_one_line(
    ranks2: Ranks, place: str, when: str, overlap: Overlap, evaluates: bool, said: str
) -> None:
    one, other = ranks2.run(_refused, place, when, overlap, evaluates)
    assert one == other
    assert "differs from a plain loop" in one
    assert said in one
    assert "of its largest entry" in one
    assert "allowed: " in one


def _forwards(schedule: str = "combined_1f1b", **options: Any) -> int:
    """Return the calls of a block in three steps, and in two by other costs."""
    (inputs, target), model, calls = models.batch(4), models.build(layers=1), list[int]()
    model[1].register_forward_pre_hook(lambda *_: calls.append(1))
    engine = make(model, build_schedule(schedule, microbatches=4), costs=COSTS, **options)
    for step in range(5):
        if step == 3:
            engine.costs = NodeCosts.uniform(attention=30, experts=4, dispatch=50, counts=0.4)
        engine.step(inputs, target=target)
    return len(calls)


def test_every_plan_is_compared_once() -> None:
    assert _forwards(overlap=3) == 4 * (5 + 2)
    assert _forwards(overlap=3, verify=False) == 4 * 5
    assert _forwards(overlap="serial") == 4 * (5 + 1)
    assert _forwards("sequential", overlap="serial") == 4 * 5


class Noisy(models.Block):
    """Scales its input by a number that no step draws twice."""

    draw: Callable[[], float]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (1 + self.draw()))


@pytest.mark.parametrize("noise", ["of atomics", "of Python"])
def test_where_loops_differ_nothing_is_compared(noise: str) -> None:
    """A warning says so; the step is one step."""
    model = models.build(block=Noisy)
    draw = {"of atomics": lambda: int.from_bytes(os.urandom(2), "little") / 2**32, "of Python": random.random}[noise]
    for block in model:
        block.draw = draw
    inputs, target = models.batch(2)
    engine = make(model, build_schedule("combined_1f1b", microbatches=2), costs=COSTS)
    with pytest.warns(
        UserWarning, match="two plain loops over one batch differ in the grad of .* allowed: torch.use_d"
    ):
        engine.step(inputs, target=target)
    if noise == "of atomics":
        _, expected = models.plain_gradients(models.build(), inputs, target, 2)
        torch.testing.assert_close(models.gradients(model), expected, rtol=1e-3, atol=1e-5)


def test_what_stands_around_nodes_meets_the_step_alone() -> None:
    """Who sums gradients outside the engine, as Megatron-Core's wrapper, sees the nodes of one step."""
    inputs, target = models.batch(4)
    model, seen = models.build(), list[object]()
    engine = make(model, build_schedule("combined_1f1b", microbatches=4), costs=COSTS)

    @contextmanager
    def around(node: object) -> Iterator[None]:
        seen.append(node)
        yield

    engine.observers.append(observing.Around(around, acts=True))
    engine.step(inputs, target=target)
    assert len(seen) == len(set(seen))
    _, expected = models.plain_gradients(models.build(), inputs, target, 4)
    torch.testing.assert_close(models.gradients(model), expected)


def test_the_places_that_others_have_changed_are_named() -> None:
    def before(block: Around, x: Tensor) -> None:
        block.scales[0].fill_(x.detach().mean())

    model = nn.Sequential(Around(before, lambda block, y, x: y * block.scales[0].clone()))
    model[0].scales = [torch.zeros(())]
    with pytest.raises(VerificationError, match="changed by another microbatch meanwhile: attribute 'scales' of Aroun"):
        _step(model)


@pytest.mark.parametrize("earlier", [False, True])
def test_gradients_of_the_loop_are_not_kept(earlier: bool) -> None:
    """Fingerprints stand for them: there is no second copy of all gradients."""

    def most(verify: bool) -> int:
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(12)))
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if earlier else None
        program, data = build_schedule("combined_1f1b", microbatches=2), torch.zeros(2, 256)
        engine = make(model, program, loss_fn=loss_fn, overlap=3, costs=COSTS, verify=verify)
        return peak_bytes(torch.device("cpu"), lambda: engine.step(data, target=data))

    weight = 256 * 256 * 4
    assert most(verify=True) < most(verify=False) + 4 * weight  # the sum over the bits of one takes that


def test_sums_in_another_order_are_not_a_difference() -> None:
    """Backwards in falling order add gradients of biases in another order than a loop: they differ by rounding."""
    inputs, target = models.batch(4)
    rows = [[Action(kind, 0, m) for kind, order in ((Kind.F, range(4)), (Kind.B, range(3, -1, -1))) for m in order]]
    program = program_of("falling", 4, Placement.loop(1), rows)
    model = models.build()
    make(model, program, costs=COSTS).step(inputs, target=target)
    _, expected = models.plain_gradients(models.build(), inputs, target, 4)
    found = models.gradients(model)
    assert models.equal(found, expected)
    torch.testing.assert_close(found, expected)


def _step(model: nn.Module, loss: Any = loss_fn, **options: Any) -> Engine:
    """Make one step of a model over vectors, in an order with several open actions."""
    program = build_schedule("combined_1f1b", microbatches=MICROBATCHES)
    engine = make(model, program, loss_fn=loss, overlap=3, costs=COSTS, **options)
    data = batch(0).to(next(model.parameters()).dtype)
    engine.step(data[0], target=data[1])
    return engine


class Around(nn.Module):
    """A layer of experts with something of a test's own around it."""

    def __init__(self, before: Callable[..., Any], behind: Callable[..., Tensor]) -> None:
        super().__init__()
        self.moe, self.before, self.behind = MoE(HIDDEN, 16, RouterConfig(4, 2)), before, behind

    def forward(self, x: Tensor) -> Tensor:
        self.before(self, x)
        return self.behind(self, x + self.moe(x), x)


STOPPED = False


def test_what_others_set_meanwhile_stays() -> None:
    """A signal's handler sets a global of the script while the loop is played."""

    def behind(block: Around, y: Tensor, x: Tensor) -> Tensor:
        globals()["STOPPED"] = True
        return y

    globals()["STOPPED"] = False
    _step(nn.Sequential(Around(lambda *_: None, behind)))
    assert STOPPED


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_alone_that_is_wrong(dtype: torch.dtype) -> None:
    """All that nodes hand on is right; a hook takes what another microbatch has kept."""
    kept: list[Tensor] = [torch.ones(())]
    keep = partial(kept.__setitem__, 0)
    model = nn.Sequential(
        *(Around(lambda b, x: keep(x.detach().mean() + 2), lambda b, y, x: y * b.scale) for _ in "ab")
    )
    for block in model:
        block.scale = nn.Parameter(torch.ones(HIDDEN))
        block.scale.register_hook(lambda grad: grad * kept[0].to(grad.dtype))
    with pytest.raises(VerificationError, match="the grad of scale"):
        _step(model.to(dtype))


def test_a_parameter_that_a_step_changes_is_refused() -> None:
    def before(block: Around, x: Tensor) -> None:
        with torch.no_grad():
            block.average.mul_(0.9).add_(x.mean())

    model = nn.Sequential(Around(before, lambda _, y, x: y))
    model[0].average = nn.Parameter(torch.zeros(()), requires_grad=False)
    weight = next(model[0].moe.parameters())
    weight.grad = torch.full_like(weight, 0.5)
    with pytest.raises(VerificationError, match=r"average of block 0 .* changes inside a step.*allowed: verify=False"):
        _step(model)
    assert (weight.grad == 0.5).all()


@pytest.mark.parametrize(
    "held",
    [
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), torch.eye(3).to_sparse(),
        torch.empty(3, device="meta"), torch.full((1,), float("nan")).expand(3), torch.ones(2, dtype=torch.complex64),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ],
    ids=["quantized", "sparse", "meta", "expanded", "complex", "nested"],
)  # fmt: skip
def test_odd_tensors_may_be_held(held: Tensor) -> None:
    model = nn.Sequential(Around(lambda *_: None, lambda _, y, x: y))
    model[0].register_buffer("held", held)
    model[0].inside = (held, [held])
    _step(model)


def test_a_loss_keeps_its_state_as_after_one_step() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("centre", torch.zeros(HIDDEN))
            self.calls = 0

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            self.calls += 1
            self.centre.lerp_(output.detach().mean(0), 0.1)
            return loss_fn(output - self.centre, target)

    found = []
    for verify in (False, True):
        torch.manual_seed(2)
        loss = Centred()
        _step(nn.Sequential(Around(lambda *_: None, lambda _, y, x: y)), loss, verify=verify)
        found.append(loss)
    assert found[1].calls == found[0].calls == MICROBATCHES
    assert torch.equal(found[1].centre, found[0].centre)


def _over(rank: int, size: int) -> list[str]:
    """Return what is said over a pipeline, whose ranks may share experts, and under FSDP2."""
    found = []
    for sizes, names in (((2, size // 2), ("pp", "ep")), ((size,), ("dp",))):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        torch.manual_seed(5)
        blocks = [Block(mesh.get_group("ep") if "ep" in names else None, "a closure", "behind") for _ in range(4)]
        for block in blocks if "dp" in names else ():
            fully_shard(block, mesh=mesh)
        program = build_schedule("combined_1f1b", ranks=2 if "pp" in names else 1, microbatches=4)
        engine = make(blocks, program, mesh=mesh, loss_fn=loss_fn, costs=COSTS, timeout=30)
        seed = mesh.get_local_rank(names[-1])
        data = torch.randn(2, 20, blocks[0].mix.in_features, generator=torch.Generator().manual_seed(seed))
        with pytest.raises(VerificationError) as caught:
            engine.step(data[0], target=data[1])
        found.append(str(caught.value).splitlines()[0])
    return found


@pytest.mark.parametrize("ranks", [2, *wide(4)])
def test_over_pipelines_and_under_fsdp2(kept: dict[int, Ranks], ranks: int) -> None:
    for said in zip(*kept[ranks].run(_over), strict=True):
        assert len(set(said)) == 1
        assert "differs from a plain loop, the grad of router.weight of block 0 (" in said[0]
