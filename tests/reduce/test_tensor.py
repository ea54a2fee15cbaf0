"""Tensor and context parallelism: gradients, norms and checkpoints against one plain process."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from overlap1f1b.checkpoint import consolidate, load_checkpoint, save_checkpoint
from overlap1f1b.engine import Engine
from overlap1f1b.plan import Overlap, compile
from overlap1f1b.play.feed import feed_batch
from overlap1f1b.schedule import build_schedule
from tests import models
from tests.engines import COSTS, make, said_of
from tests.pauses import pauses
from tests.ranks import Ranks, over
from tests.reduce import tensors
from tests.tiers import first, wide

MICROBATCHES = 4
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass(frozen=True)
class Layout:
    """A mesh, and how the model is split over it."""

    mesh: dict[str, int]
    sequence: bool = False  # parts of the tokens on each rank of the tensor group
    sharded: bool = False  # FSDP2 along "dp"
    ring: bool = False  # ring attention along "cp"; else Ulysses
    by_hand: bool = False  # plain slices along "tp"; else DTensors

    @property
    def ranks(self) -> int:
        return prod(self.mesh.values())


LAYOUTS = {
    "tp": Layout({"tp": 2}),
    "tp with sequences": Layout({"tp": 2}, sequence=True),
    "tp 4": Layout({"tp": 4}),
    "tp by hand": Layout({"tp": 2}, by_hand=True),
    "tp 4 by hand": Layout({"tp": 4}, by_hand=True),
    "ep x tp by hand": Layout({"ep": 2, "tp": 2}, by_hand=True),
    "dp x ep": Layout({"dp": 2, "ep": 2}),
    "cp": Layout({"cp": 2}),
    "cp in a ring": Layout({"cp": 4}, ring=True),
    "ep x tp": Layout({"ep": 2, "tp": 2}),
    "ep x tp with sequences": Layout({"ep": 2, "tp": 2}, sequence=True),
    "dp x tp with sequences": Layout({"dp": 2, "tp": 2}, sequence=True),
    "pp x tp": Layout({"pp": 2, "tp": 2}),
    "pp x tp with sequences": Layout({"pp": 2, "tp": 2}, sequence=True),
    "FSDP2 x tp": Layout({"dp": 2, "tp": 2}, sharded=True),
    "FSDP2 x tp with sequences": Layout({"dp": 2, "tp": 2}, sequence=True, sharded=True),
    "ep x cp": Layout({"ep": 2, "cp": 2}),
    "ep x cp in a ring": Layout({"ep": 2, "cp": 2}, ring=True),
    "pp x cp in a ring": Layout({"pp": 2, "cp": 2}, ring=True),
    "cp x tp": Layout({"cp": 2, "tp": 2}),
    "cp x tp in a ring": Layout({"cp": 2, "tp": 2}, ring=True),
}


def data_of(mesh: DeviceMesh | None, number: int, counted: bool = False) -> tuple[Tensor, Tensor]:
    """This rank's part of a batch: its own sequences, and of them its own tokens; perhaps only some count."""
    inputs, target = models.batch(MICROBATCHES, rows=2, sequence=tensors.S, seed=number)
    if counted:
        target = target.where(torch.rand(target.shape, generator=torch.Generator().manual_seed(7 + number)) < 0.6, -100)
    if mesh is None or "cp" not in (mesh.mesh_dim_names or ()):
        return inputs, target
    at, size = mesh.get_local_rank("cp"), mesh["cp"].size()
    return inputs.chunk(size, 1)[at].contiguous(), target.chunk(size, 1)[at].contiguous()


def number_of(mesh: DeviceMesh) -> tuple[int, int]:
    """The number of this rank's sequences, and how many there are."""
    number, count = 0, 1
    for name in ("dp", "ep"):
        if name in (mesh.mesh_dim_names or ()):
            number, count = number * mesh[name].size() + mesh.get_local_rank(name), count * mesh[name].size()
    return number, count


def mesh_of(name: str) -> DeviceMesh:
    sizes = LAYOUTS[name].mesh
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def pair() -> DeviceMesh:
    """Two ranks that share each layer."""
    return init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def engine_over(
    mesh: DeviceMesh, name: str, *, schedule: str = "combined_1f1b", layers: int = 2, **options: Any
) -> Engine:
    layout = LAYOUTS[name]
    program = build_schedule(schedule, ranks=layout.mesh.get("pp", 1), microbatches=MICROBATCHES)
    model = tensors.build(mesh, sequence=layout.sequence, ring=layout.ring, layers=layers, by_hand=layout.by_hand)
    for block in model if layout.sharded else ():
        fully_shard(block, mesh=mesh["dp"])
    if layout.sequence:
        options["experts_over"] = ("ep", "tp")
    return make(model, program, mesh=mesh, **{"costs": COSTS, "timeout": 30} | options)


def labels(target: Tensor) -> int:
    return int((target >= 0).sum())


def engine_of(model: nn.Module, mesh: DeviceMesh, over: Sequence[str] = ("ep", "tp")) -> Engine:
    program = build_schedule("combined_1f1b", microbatches=MICROBATCHES)
    return make(model, program, mesh=mesh, costs=COSTS, timeout=30, experts_over=over)


@cache
def expected(count: int, counted: bool = False, layers: int = 2) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients and their norm of one process with all data."""
    model, data = tensors.build(layers=layers), [data_of(None, number, counted) for number in range(count)]
    for x, y in data:
        if counted:
            loss = cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
            (loss / sum(labels(target) for _, target in data)).backward()
        else:
            models.plain_gradients(model, x, y, MICROBATCHES, 1 / count)
    gradients = models.gradients(model)
    return gradients, clip_grad_norm_(model.parameters(), 1e9)


def differences(engine: Engine, wanted: dict[str, Tensor], tolerance: float = 1e-12) -> list[str]:
    """Names of this rank's parameters whose gradients are not those of one process."""
    problems = []
    rank, ranks = engine.mesh.expert_slice
    tensor_rank, tensor_ranks = engine.mesh.rank("tp"), engine.mesh.size("tp")
    held = {id(b) for stage in engine.stages.values() for b in stage.blocks}
    for index, block in enumerate(engine.model):
        if id(block) not in held:
            continue
        for name, parameter in block.named_parameters():
            grad: Any = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if isinstance(grad, DTensor):
                if grad.placements != parameter.placements:  # type: ignore[attr-defined]
                    problems.append(f"{index}.{name} has placements {grad.placements}")
                grad = grad.full_tensor()
            whole = wanted[f"{index}.{name}"]
            if "experts" in name:
                whole = whole.chunk(ranks)[rank]
            if (along := getattr(parameter, "partition_dim", None)) is not None:
                whole = whole.chunk(tensor_ranks, along)[tensor_rank]
            error = float((grad - whole).abs().max() / max(float(whole.abs().max()), 1.0))
            if not error <= tolerance:
                problems.append(f"{index}.{name} is off by {error:.1e}")
    return problems


CASES: list[Any] = [
    ("tp", 3, {"layers": 1}),
    ("tp with sequences", "pairs", {"schedule": "zb_h1", "layers": 1}),
    ("cp", "pairs", {}),
    ("ep x tp", 3, {"layers": 1}),
    ("tp by hand", 3, {"recompute": "block"}),
    ("ep x tp by hand", 3, {"counted": True}),
    ("ep x tp with sequences", 3, {"recompute": "block", "capacity": 8.0, "counted": True}),
    ("dp x tp with sequences", "pairs", {"recompute": "attention", "parts": 2, "layers": 1}),
    ("pp x tp", "pairs", {"schedule": "zb_v"}),
    ("pp x tp with sequences", 3, {"schedule": "dualpipev"}),
    ("FSDP2 x tp with sequences", 3, {"layers": 1}),
    ("ep x cp in a ring", 3, {"recompute": "block", "capacity": 8.0}),
    ("ep x cp", "pairs", {"recompute": "attention", "parts": 2, "counted": True}),
    ("pp x cp in a ring", "pairs", {}),
    ("cp x tp", 3, {}),
    ("cp x tp in a ring", "pairs", {"counted": True}),
]
"""Layouts that are not here stand in tests of measured plans and checkpoints."""


@pytest.mark.wide
@pytest.mark.parametrize(("name", "last", "options"), CASES, ids=str)
@over(lambda name, *_: LAYOUTS[name].ranks)
def test_gradients_and_norms_are_those_of_one_process(
    rank: int, size: int, name: str, last: Overlap, options: dict[str, Any]
) -> None:
    """A step that overlaps; behind a serial one, where that finds the exchanges that blocks make by themselves.

    If labels are ``counted``, their numbers are uneven, and ranks along "cp" and "ep" have their own.
    """
    mesh, counted = mesh_of(name), options.pop("counted", False)
    number, count = number_of(mesh)
    wanted, norm = expected(count, counted, options.get("layers", 2))
    engine = engine_over(mesh, name, count_tokens=labels if counted else None, **options)
    inputs, target = data_of(mesh, number, counted)
    problems = []
    played: list[Overlap] = ["serial", last] if "cp" in LAYOUTS[name].mesh else [last]
    for overlap in played:
        engine.model.zero_grad()
        engine.plan = compile(engine.program, engine.shapes, COSTS, overlap)
        with pauses(rank):
            engine.step(inputs, target=target)
        problems += [f"{overlap}: {problem}" for problem in differences(engine, wanted)]
        found = engine.clip_gradients(1e9)
        if abs(float(found) - float(norm)) > 1e-12 * float(norm):
            problems.append(f"{overlap}: norm {float(found)}, not {float(norm)}")
    assert not problems, problems


@cache
def plain_loss(count: int) -> float:
    """The mean loss of one process over the data of all ranks."""
    model, losses = tensors.build(layers=1), []
    for number in range(count):
        inputs, target = data_of(None, number)
        parts = zip(inputs.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True)
        losses += [float(models.loss_fn(model(x), y)) for x, y in parts]
    return sum(losses) / len(losses)


@pytest.mark.parametrize("name", ["tp with sequences", *wide("ep x tp with sequences", "cp in a ring", "pp x tp")])
@over(lambda name: LAYOUTS[name].ranks)
def test_measured_plans(rank: int, size: int, name: str) -> None:
    """All ranks of a tensor group must find the same plan; losses and clipped gradients are those of one process.

    Steps before, while and after costs are measured, and exchanges that blocks make by themselves are found.
    """
    mesh = mesh_of(name)
    number, count = number_of(mesh)
    wanted, norm = expected(count, layers=1)
    engine = engine_over(mesh, name, costs=None, layers=1)
    inputs, target = data_of(mesh, number)
    problems, plans = [], [engine.plan]
    for step in range(3):
        engine.model.zero_grad()
        with pauses(rank):
            loss = engine.mean_loss(engine.step(inputs, target=target))
        problems += [f"step {step}: {problem}" for problem in differences(engine, wanted)]
        if abs(loss - plain_loss(count)) > 1e-12:
            problems.append(f"step {step}: loss {loss}, not {plain_loss(count)}")
        found = engine.clip_gradients(float(norm) / 2)
        engine.mesh.agree({"norm": float(found)})  # equal on all ranks, to the bit
        if abs(float(found) - float(norm)) > 1e-12 * float(norm):
            problems.append(f"step {step}: norm {float(found)}, not {float(norm)}")
        halved = {name: grad / 2 for name, grad in wanted.items()}
        problems += [f"step {step}, clipped: {problem}" for problem in differences(engine, halved, 1e-6)]
        plans.append(engine.plan)
    if engine.costs is None or plans[-1] is plans[0]:
        problems.append("no plan was compiled for measured costs")
    assert not problems, problems


SAVED = {
    "two ranks": ["tp with sequences", "tp by hand", "tp"],
    "tp and by hand": ["ep x tp", "tp 4 by hand"],
    "stages": ["tp 4 by hand", "pp x tp"],
    "data and FSDP2": ["ep x tp by hand", "dp x ep", "FSDP2 x tp", "dp x tp with sequences"],
}


def _saved(rank: int, size: int, names: list[str], folder: Path) -> list[float]:
    """The loss behind a step from a checkpoint, in the layout that saved and in others."""
    found = []
    for number, name in enumerate(names):
        mesh = mesh_of(name)
        engine = engine_over(mesh, name, layers=1)
        optimizer = torch.optim.AdamW(engine.parameters(), lr=0.05 if number else 0.01)
        inputs, target = data_of(mesh, 0)

        def train(engine: Engine = engine, optimizer: Any = optimizer, data: Any = (inputs, target)) -> None:
            engine.step(data[0], target=data[1])
            optimizer.step()
            optimizer.zero_grad()

        if number:
            assert load_checkpoint(engine, folder / str(number - 1), optimizer) == 1
        else:
            train()
        save_checkpoint(engine, folder / str(number), 1, optimizer, background=number % 2 == 1).result()
        if rank == 0:
            consolidate(folder / str(number), folder / f"whole {number}")
        engine.mesh.agree({"written": True})
        train()
        found.append(engine.mean_loss(engine.evaluate(inputs, target=target)))
    return found


@pytest.mark.parametrize("case", first(SAVED, "two ranks"))
def test_a_checkpoint_goes_round_over_tensor_layouts(kept: dict[int, Ranks], tmp_path: Path, case: str) -> None:
    """Each layout loads what the layout before it has saved, to the bit, and all train on alike."""
    for losses in kept[LAYOUTS[SAVED[case][0]].ranks].run(_saved, SAVED[case], tmp_path, timeout=200):
        assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-11)
    first, *others = (
        load_file(tmp_path / f"whole {number}" / "model.safetensors") for number in range(len(SAVED[case]))
    )
    for stored in others:
        assert stored.keys() == first.keys()
        assert all(torch.equal(stored[name], value) for name, value in first.items())


@pytest.mark.skipif(torch.__version__ < "2.13", reason="refused before torch 2.13")
@pytest.mark.parametrize("data_ranks", [1, *wide(2)])
@over(lambda data_ranks: 2 * data_ranks)
def test_mixed_precision(rank: int, size: int, data_ranks: int) -> None:
    """Gradients under FSDP2's mixed precision, which it sums beside ``.grad``, against one process in float32."""
    mesh = init_device_mesh("cpu", (data_ranks, 2), mesh_dim_names=("dp", "tp"))
    inputs, target = data_of(mesh, mesh.get_local_rank("dp"))
    model = tensors.build(mesh, sequence=True, layers=1).float()
    for block in model:
        fully_shard(block, mesh=mesh["dp"], mp_policy=MIXED)
    engine = engine_of(model, mesh)
    with pauses(rank):
        engine.step(inputs, target=target)
    problems = differences(engine, expected(data_ranks, layers=1)[0], 0.05)
    assert not problems, problems


@over(4)
def test_experts_are_stored_in_the_order_of_their_group(rank: int, size: int, tmp_path: Path) -> None:
    """In a mesh that names the tensor group first."""
    whole = tensors.build()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "ep"))
    engine = engine_of(tensors.build(mesh, sequence=True), mesh)
    save_checkpoint(engine, tmp_path, 1, torch.optim.SGD(engine.parameters(), lr=0.1))
    if rank == 0:
        consolidate(tmp_path, tmp_path / "whole")
    engine.mesh.agree({"written": True})
    stored = load_file(tmp_path / "whole" / "model.safetensors")
    problems = [name for name, value in whole.state_dict().items() if not torch.equal(stored[name], value)]
    assert not problems, problems


class Failing(nn.Module):
    """Fails on one rank, where the others wait for it."""

    def __init__(self, linear: nn.Module, fails: bool) -> None:
        super().__init__()
        self.linear, self.fails = linear, fails

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise KeyError("broken")
        return self.linear(x)


@over(2)
def test_a_rank_that_fails_in_a_block_ends_its_tensor_group(rank: int, size: int) -> None:
    """Long before the limit."""
    mesh, linear = pair(), nn.Linear(tensors.H, tensors.H)
    parallelize_module(linear, mesh, RowwiseParallel(input_layouts=Replicate()))
    model = nn.Sequential(Failing(linear, rank == 0), nn.Linear(tensors.H, 4))
    program = build_schedule("1f1b", microbatches=2)
    engine = make(model, program, mesh=mesh, loss_fn=lambda y, _: y.sum(), costs=COSTS, timeout=1000)
    x = torch.ones(4, tensors.H)
    with pytest.raises((RuntimeError, KeyError)) as caught:
        engine.step(x, target=x)
    text = said_of(caught.value)
    assert "rank tp 0 failed" in text or "broken" in text


@over(2)
def test_auxiliary_losses_count_tokens_once(rank: int, size: int) -> None:
    """Their factors, by whether the tensor group shares the experts."""
    mesh = pair()
    for shared, factor in ((("ep",), 1 / MICROBATCHES), (("ep", "tp"), 1 / (2 * MICROBATCHES))):
        with engine_of(tensors.build(mesh, sequence=len(shared) > 1, layers=1), mesh, shared) as engine:
            feed = feed_batch(engine.stages, engine.program, engine.mesh, *data_of(None, 0), loss_fn=models.loss_fn)
            assert feed.aux_scale == factor, feed.aux_scale


DIFFERENT = "allowed: the same on all ranks"
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another batch": ({"sequence": True}, f"the values of inputs on pp 0, dp 0, ep 0 differ between .*; {DIFFERENT}"),
    "another copy of a router": (
        {"sequence": True},
        rf"the values of parameter gate.weight of block 1 \(Block\) of stage 0 differ between .*; {DIFFERENT}",
    ),
    "experts that are copied, with other tokens": (
        {"sequence": True, "over": ("ep",)},
        "the gradient of parameter experts.*allowed: ",
    ),
    "experts that are shared, with the same tokens": (
        {"over": ("ep", "tp")},
        r"experts_over=\('ep', 'tp'\) with the same tokens on all ranks of a tensor group, \[0, 1\].*allowed: ",
    ),
    "a router with other tokens": ({"sequence": True}, "the gradient of parameter gate.weight of block 1.*allowed: "),
}


@pytest.mark.parametrize("case", WRONG)
@over(2)
def test_what_differs_or_does_not_fit_the_layout_is_refused(rank: int, size: int, case: str) -> None:
    """Else experts or routers would learn wrong gradients in silence."""
    (options, message), mesh = WRONG[case], pair()
    model = tensors.build(mesh, layers=1, **options)
    gate: Any = model[1].gate
    if case == "another copy of a router" and rank:
        gate.weight.data.to_local().mul_(2)
    if case == "a router with other tokens":
        gate.weight = nn.Parameter(torch.tensor(gate.weight.full_tensor()))
    engine = engine_of(model, mesh, options.get("over", ("ep", "tp")))
    inputs, target = data_of(None, rank if case == "another batch" else 0)
    if "shared" in case:
        engine.evaluate(inputs, target=target)  # its tokens are not compared
    with pytest.raises(ValueError, match=f"^{message}"):
        engine.step(inputs, target=target)


@pytest.mark.parametrize("reduced", [None, *wide(torch.float64)], ids=str)
@over(2)
def test_steps_without_a_reduction_are_part_of_the_next_one_under_fsdp2(
    rank: int, size: int, reduced: torch.dtype | None
) -> None:
    """Also where gradients are summed in the dtype that they have."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = tensors.build(mesh, sequence=True, layers=1)
    for block in model:
        fully_shard(block, mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(reduce_dtype=reduced))
    engine = engine_of(model, mesh)
    inputs, target = data_of(None, 0)
    for reduces in (False, True):
        for block in model:
            block.set_requires_gradient_sync(reduces)
        engine.step(inputs, target=target)
    problems = differences(engine, {name: 2 * grad for name, grad in expected(1, layers=1)[0].items()})
    assert not problems, problems


@over(2)
def test_tokens_that_are_all_alike_are_not_refused(rank: int, size: int) -> None:
    """A batch of one token without positions, which ranks cannot tell from the same tokens on each."""
    mesh = pair()
    model = tensors.build(mesh, sequence=True, layers=1)
    nn.init.zeros_(model[0].positions.weight)
    inputs, target = data_of(None, 0)
    assert engine_of(model, mesh).step(torch.zeros_like(inputs), target=target).loss is not None


class Scale(nn.Module):
    """A factor that the first rank of a tensor group uses for its part of the tokens, and the second not or for all."""

    def __init__(self, mesh: DeviceMesh, *, both: bool = False) -> None:
        super().__init__()
        self.first, self.both, self.used = mesh.get_local_rank() == 0, both, True
        self.weight = nn.Parameter(distribute_tensor(torch.ones(tensors.H), mesh, [Replicate()]))

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        if self.used and (self.first or self.both):
            return x * weight.to_local(grad_placements=[Partial() if self.first else Replicate()])
        return x.clone()


def _scaled(*, both: bool = False, mixed: bool = False) -> tuple[Engine, Scale]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    linear, scale = nn.Linear(tensors.H, tensors.H), Scale(mesh["tp"], both=both)
    parallelize_module(linear, mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
    for block in (linear, scale) if mixed else ():
        fully_shard(block, mesh=mesh["dp"], mp_policy=MIXED)
    program = build_schedule("1f1b", microbatches=2)
    options: dict[str, Any] = {"mesh": mesh, "costs": COSTS, "timeout": 30}
    return make(nn.Sequential(linear, scale), program, loss_fn=lambda y, _: y.float().sum(), **options), scale


def _lacking(rank: int, size: int, used: Sequence[bool], mixed: bool = False) -> list[Any]:
    """The gradients of two steps in which a rank uses the factor."""
    engine, scale = _scaled(mixed=mixed)
    x = torch.arange(4.0 * tensors.H).reshape(4, -1) / 100
    grads = []
    for scale.used in used:
        engine.step(x, target=x)
        grad: Any = scale.weight.grad
        if grad is not None:
            assert mixed or grad.placements == (Replicate(),)
            grads.append(grad.to_local().tolist())
        scale.zero_grad()
    return grads


@over(2)
def test_gradients_of_two_steps_are_added(rank: int, size: int) -> None:
    """Two steps without ``zero_grad`` give twice the gradient of one."""
    engine, _ = _scaled()
    x = torch.arange(4.0 * tensors.H).reshape(4, -1) / 100
    found = []
    for _ in range(2):
        engine.step(x, target=x)
        found.append([p.grad.to_local().clone() for p in engine.parameters() if isinstance(p.grad, DTensor)])
    assert len(found[0]) == 3
    assert all(torch.equal(2 * one, two) for one, two in zip(*found, strict=True)), found


AT_2_13 = pytest.mark.skipif(torch.__version__ < "2.13", reason="refused before torch 2.13")


@pytest.mark.parametrize(
    ("used", "mixed"),
    [([True, True], False), pytest.param([True, True], True, marks=AT_2_13), *wide(([False, True, True], False))],
)
def test_a_rank_without_a_gradient_takes_part_in_the_sum(ranks2: Ranks, used: Sequence[bool], mixed: bool) -> None:
    """Also where the first step gives a gradient to no rank, and under FSDP2, which sums these beside ``.grad``."""
    first, second = ranks2.run(_lacking, used, mixed)
    assert first == second
    assert len(first) == 2
    assert first[0] == first[1]
    assert any(first[0])


@over(2)
def test_gradients_of_other_placements_on_each_rank_are_refused(rank: int, size: int) -> None:
    engine, _ = _scaled(both=True)
    x = torch.ones(4, tensors.H)
    message = r"^the gradient of weight of block 1 \(Scale\) has placements \(Replicate\(\),\) on a rank of.*"
    with pytest.raises(ValueError, match=message + DIFFERENT):
        engine.step(x, target=x)


@over(4)
def test_what_stages_pass_on(rank: int, size: int) -> None:
    """Stages that pass on a DTensor in parts of two sizes, of sums that are not complete, and a result under way."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    program = build_schedule("combined_1f1b", ranks=2, microbatches=MICROBATCHES)
    generator = torch.Generator().manual_seed(1)
    tokens = 7 if torch.__version__ >= "2.13" else 8  # torch 2.11 gathers no uneven parts of a second dimension
    x, y = torch.randn(2, 2 * MICROBATCHES, tokens, tensors.H, generator=generator, dtype=torch.float64)

    def mean_square(found: Any, wanted: Tensor) -> Tensor:
        whole = found.full_tensor() if isinstance(found, DTensor) else found
        return (whole - wanted).square().mean()

    problems = []
    for layout, plain in ((Shard(1), False), (Replicate(), False), (Replicate(), True), (Partial(), False)):
        torch.manual_seed(7)
        blocks = [nn.Linear(tensors.H, tensors.H, dtype=torch.float64) for _ in range(2)]
        for a, b in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            (mean_square(blocks[1](blocks[0](a).relu()), b) / MICROBATCHES).backward()
        wanted = [p.grad for block in blocks for p in block.parameters()]
        torch.manual_seed(7)
        model = nn.Sequential(*(nn.Linear(tensors.H, tensors.H, dtype=torch.float64) for _ in range(2)))
        row = RowwiseParallel(input_layouts=Replicate(), output_layouts=layout, use_local_output=plain)
        parallelize_module(model[0], mesh["tp"], row)
        first = nn.Sequential(model[0])
        second = nn.Sequential(nn.ReLU(), model[1])
        into = () if plain else ((layout if layout.is_shard() else Replicate()),)
        column = ColwiseParallel(input_layouts=into[0] if into else Replicate(), output_layouts=Replicate())
        parallelize_module(model[1], mesh["tp"], column)
        stages: dict[int, Any] = {0: [first]} if mesh.get_local_rank("pp") == 0 else {1: [second]}
        engine = make(stages, program, mesh=mesh, loss_fn=mean_square, costs=COSTS, timeout=20)
        for step in range(2):
            for p in engine.parameters():
                p.grad = None
            engine.step(x, target=y)
            found = [p.grad for p in model[mesh.get_local_rank("pp")].parameters()]
            at = 2 * mesh.get_local_rank("pp")
            for have, want in zip(found, wanted[at : at + 2], strict=True):
                whole = have.full_tensor() if isinstance(have, DTensor) else have
                if not torch.allclose(whole, want, rtol=1e-12, atol=1e-14):
                    problems.append(f"{layout}, step {step}: {float((whole - want).abs().max())}")
        engine.close()
    assert not problems, problems


MARKS: list[tuple[dict[str, Any], str, str]] = [
    (
        {"tensor_model_parallel": False},
        "the values of parameter attention.o.weight of block 1 (Block) of stage 0 differ between ",
        "tensor_model_parallel = True on slices over 'tp'",
    ),
    (
        {"partition_dim": 2},
        "partition_dim=2 of a parameter [24, 12] with tensor_model_parallel = True; ",
        "allowed: the dimension of its slices over 'tp', 0 to 1",
    ),
    ({"partition_stride": 2}, "", ": partition_stride=2 of 1.attention.o.weight in a checkpoint; allowed: 1"),
]


@pytest.mark.parametrize(("marks", "begins", "ends"), MARKS)
@over(2)
def test_marks_that_are_missing_or_wrong(
    rank: int, size: int, marks: dict[str, Any], begins: str, ends: str, tmp_path: Path
) -> None:
    engine = engine_over(pair(), "tp by hand", layers=1)
    vars(engine.model[1].attention.o.weight).update(marks)  # type: ignore[index]
    inputs, target = data_of(None, 0)
    with pytest.raises(ValueError, match="allowed: ") as caught:  # noqa: PT012  either may raise
        engine.step(inputs, target=target)
        save_checkpoint(engine, tmp_path, 1, torch.optim.SGD(engine.parameters()))
    message = str(caught.value)
    assert message.startswith(begins), message
    assert message.endswith(ends), message


@over(2)
def test_what_cannot_be_played_is_refused(rank: int, size: int) -> None:
    mesh, other = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")), pair()
    program, some = build_schedule("combined_1f1b", microbatches=2), "allowed: a list of ep, cp, or tp"
    foreign = (
        "parameter 0.tokens.weight of Sequential is a DTensor over 'tp' of ranks [0, 1], which is not FSDP2's "
        "over the engine's ranks {}; allowed: FSDP2 over these ranks, tensor parallelism over the mesh's "
        "dimension 'tp', experts over its 'ep'"
    )
    sp, ep, cp = (init_device_mesh("cpu", (2,), mesh_dim_names=(name,)) for name in ("sp", "ep", "cp"))
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (sp, {}, "mesh with dimensions ('sp',) of sizes (2,); allowed: any of 'pp', 'dp', 'ep', 'cp', 'tp'"),
        (mesh, {"experts_over": ()}, f"experts_over=(); {some}, one or more"),
        (mesh, {"experts_over": {"dp"}}, "experts_over={'dp'}; " + some),
        (mesh["dp"], {}, foreign.format([rank])),
        (ep, {}, foreign.format([0, 1])),
        (cp, {}, foreign.format([0, 1])),  # last: its group ends
    ]
    for given, options, message in cases:
        with pytest.raises(ValueError, match=rf"^{re.escape(message)}(\n|$)"):
            make(tensors.build(other), program, mesh=given, timeout=10, **options)


@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
@over(2)
def test_linear_layers_split_over_the_ranks_of_the_experts_are_refused(rank: int, size: int, style: Any) -> None:
    """Their ranks have different tokens."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU())
    parallelize_module(model[0], mesh, style())
    message = (
        "^parameter 0.weight of Sequential is split over the ranks that share the experts, as by "
        "parallelize_module; allowed: such layers over the mesh's dimension 'tp', stacked experts over 'ep'(\n|$)"
    )
    with pytest.raises(ValueError, match=message):
        make(model, build_schedule("1f1b", microbatches=2), mesh=mesh, timeout=10)


@pytest.mark.parametrize("ranks", [2, *wide(4)])
@over(lambda ranks: ranks)
def test_ranks_that_blocks_meet_beside_the_mesh_play_one_plan(rank: int, size: int, ranks: int) -> None:
    """Engines over "ep" alone, while blocks meet along "tp", where one rank is slow."""
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("ep", "tp"))
    program, inputs = build_schedule("combined_1f1b", microbatches=4), data_of(None, mesh.get_local_rank("ep"))
    found, order = list[dict[str, Tensor]](), ""
    for overlap in ("serial", 3):
        model = tensors.build(mesh, layers=1, by_hand=True)
        for block in model if mesh.get_local_rank("tp") else ():
            block.register_forward_pre_hook(lambda *_: time.sleep(0.002))
        engine = make(model, program, mesh=mesh["ep"], overlap=overlap, timeout=30)
        for _ in range(8 if overlap == 3 else 1):  # until plans have been tried
            model.zero_grad()
            engine.step(inputs[0], target=inputs[1])
        found.append(models.gradients(model))
        order = engine.plan.fingerprint
    orders: list[str] = [""] * size
    dist.all_gather_object(orders, order)
    assert len(set(orders)) == 1, orders
    problems = models.equal(*found)
    assert not problems, problems
