"""Blocks under torch's FSDP2: gradients against FSDP2's own loop, bit for bit, and against one process."""

import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from overlap1f1b.engine import Engine
from overlap1f1b.plan import Node, Op, Overlap, Resource, compile
from overlap1f1b.reduce import fsdp
from overlap1f1b.reduce.fsdp import AHEAD
from overlap1f1b.schedule import Kind, Program, build_schedule
from overlap1f1b.transport.calls import exchange
from overlap1f1b.transport.exchange import build_exchange
from tests import models
from tests.engines import COSTS, make
from tests.observing import Around
from tests.ranks import over
from tests.tiers import wide

PROGRAMS = [("combined_1f1b", 1), ("combined_1f1b", 3), ("zb_h1", None)]
OVERLAPS: list[Overlap] = ["serial", "pairs", 3]
WRAPS = ["blocks", "hybrid", "replicate", "root", "some"]
FOUR = ["blocks", "hybrid", "root"]
"""Ways to wrap over four ranks, each with the program of its place."""


def programs(microbatches: int) -> list[Program]:
    return [build_schedule(n, microbatches=microbatches, extra_warmup=w) for n, w in PROGRAMS]


def wrapped(
    wrap: str, mesh: DeviceMesh, *, policy: MixedPrecisionPolicy | None = None, **options: Any
) -> nn.Sequential:
    """Experts are sharded over "dp", all the rest over both dimensions; ``"some"`` leaves every other block plain."""
    model = models.build(mesh.get_group("ep"), **options)
    every = init_device_mesh("cpu", (mesh.size(),))
    if wrap == "hybrid":  # sharded over half of the ranks, the other half the same
        every = init_device_mesh("cpu", (2, mesh.size() // 2), mesh_dim_names=("replicate", "shard"))
    apply: Any = replicate if wrap == "replicate" else fully_shard
    precision = {} if policy is None else {"mp_policy": policy}
    for index, block in enumerate(model):
        if wrap == "some" and index % 2 == 0:
            continue
        for experts in getattr(block, "experts", ()):
            apply(experts, mesh=mesh["dp"], **precision)
        if wrap != "root" or 0 < index < len(model) - 1:
            apply(block, mesh=every, **precision)
    if wrap == "root":  # holds what no block holds: the embedding and the head
        apply(model, mesh=every, **precision)
    return model


def sharded(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def own_loop(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    microbatches: int,
    ranks: int,
    loss_fn: Callable[[Tensor, Tensor], Tensor] = models.loss_fn,
) -> dict[str, Tensor]:
    """FSDP2's own gradients, summed over the ranks after the last microbatch."""
    for module in sharded(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if hasattr(module, "set_reduce_scatter_unused_params"):  # torch 2.13
            module.set_reduce_scatter_unused_params(True)
    parts = zip(data[0].chunk(microbatches), data[1].chunk(microbatches), strict=True)
    for index, (x, y) in enumerate(parts):
        for module in sharded(model):
            module.set_requires_gradient_sync(index == microbatches - 1)
        (loss_fn(model(x), y) * (1 / (microbatches * ranks))).backward()  # type: ignore[no-untyped-call]
    return models.gradients(model)


def meshed(size: int, dp: int) -> DeviceMesh:
    return init_device_mesh("cpu", (dp, size // dp), mesh_dim_names=("dp", "ep"))


def engine_over(model: nn.Sequential, program: Program, mesh: DeviceMesh | None, **options: Any) -> Engine:
    """An engine that leaves out the check of its first step, which the comparison with FSDP2's own loop has."""
    return make(model, program, mesh=mesh, **{"costs": COSTS, "timeout": 20, "verify": False} | options)


@pytest.mark.parametrize(
    ("ranks", "dp", "wrap"),
    [(2, 1, "blocks"), *wide(*((2, 2, wrap) for wrap in WRAPS), *((4, 2, wrap) for wrap in FOUR))],
)
@over(lambda ranks, *_: ranks, timeout=120)
def test_gradients_equal_fsdp2_bit_for_bit(rank: int, size: int, ranks: int, dp: int, wrap: str) -> None:
    """The other two ways over four ranks below: blocks that the engine reduces, and copies in the norm."""
    mesh, problems, microbatches = meshed(size, dp), [], 3 if size == 2 or wrap == "blocks" else 2
    data = [models.batch(microbatches, seed=r) for r in range(size)]
    expected = models.of_one_process(models.build(), data, microbatches)
    exchange = build_exchange(mesh.get_group("ep"))
    reference: dict[str, Tensor] = {}
    if wrap != "some":  # which has plain blocks that nothing else reduces
        reference = own_loop(wrapped(wrap, mesh), data[rank], microbatches, size)
    for number, program in enumerate(programs(microbatches)):
        if size == 4 and number != FOUR.index(wrap):
            continue  # each way to wrap with one program, as two ranks play all
        model = wrapped(wrap, mesh)
        engine = engine_over(model, program, mesh, exchange=exchange, verify=True)
        overlaps = OVERLAPS[number : None if (size, dp, wrap) == (2, 2, "blocks") else number + 1]
        for overlap in OVERLAPS[1:] if size == 4 else overlaps:
            model.zero_grad()
            engine.plan = compile(program, engine.shapes, COSTS, overlap)
            engine.step(data[rank][0], target=data[rank][1])
            found = models.gradients(model)
            reference = reference or found
            problems += [f"{program.name} {overlap}: {name}" for name in models.equal(found, reference)]
    problems += models.apart(reference, expected, mesh.get_local_rank("ep"), size // dp, 1e-5)
    assert not problems, problems


class Sometimes(models.Block):
    """A block with a parameter that only the first rank reaches."""

    def __init__(self, group: dist.ProcessGroup | None = None, **options: Any) -> None:
        super().__init__(group, **options)
        self.side = nn.Linear(models.H, models.H)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.side(x) if dist.get_rank() == 0 else x)


class Frozen(models.Block):
    """A block that trains only some of its parameters, as under LoRA."""

    def __init__(self, group: dist.ProcessGroup | None = None, **options: Any) -> None:
        super().__init__(group, **options)
        for part in (self.norm, self.mix, next(self.experts[0].parameters())):
            part.requires_grad_(False)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="refused before torch 2.13")
@pytest.mark.parametrize(
    ("reduce_dtype", "frozen"), [(torch.float32, False), *wide((None, False), (torch.float32, True))]
)
@over(2)
def test_mixed_precision_sums_as_fsdp2_does(
    rank: int, size: int, reduce_dtype: torch.dtype | None, frozen: bool
) -> None:
    """bfloat16 parameters, with gradients summed in the same dtype over microbatches and over ranks."""
    mesh, data = meshed(size, size), models.batch(3, seed=rank)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    # Before torch 2.15 its own loop fails where a parameter that is summed in another dtype is not reached.
    block = Sometimes if reduce_dtype is None or torch.__version__ >= "2.15" else models.Block
    block = Frozen if frozen else block
    expected = own_loop(wrapped("blocks", mesh, policy=policy, block=block), data, 3, size)
    problems = []
    for program, overlap in zip(programs(3), OVERLAPS, strict=True):
        model = wrapped("blocks", mesh, policy=policy, block=block)
        engine_over(model, program, mesh, overlap=overlap).step(data[0], target=data[1])
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters() if p.requires_grad)
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
        problems += [f"{program.name} {overlap}: {name}" for name in models.equal(models.gradients(model), expected)]
    assert not problems, problems


@over(2)
def test_steps_mix_with_fsdp2s_own(rank: int, size: int) -> None:
    """Steps with an optimizer, one that accumulates, evaluations, and FSDP2's own loop before and after."""
    mesh, found = meshed(size, size), {}
    for engine_drives in (False, True):
        model = wrapped("root", mesh)
        model[2].requires_grad_(False)
        own_loop(model, models.batch(2, seed=rank), 2, size)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        engine = engine_over(model, programs(2)[0], mesh)
        for number in range(3):
            data = models.batch(2, seed=10 * number + rank)
            if not engine_drives:
                own_loop(model, data, 2, size)
            else:
                engine.step(data[0], target=data[1])
                if number == 1:
                    engine.evaluate(data[0], target=data[1])
            if number != 1:
                optimizer.step()
                optimizer.zero_grad()
        own_loop(model, models.batch(2, seed=rank), 2, size)
        values = {f"{name} itself": p.full_tensor() for name, p in model.named_parameters() if isinstance(p, DTensor)}
        found[engine_drives] = models.gradients(model) | values
    problems = models.equal(found[False], found[True])
    assert not problems, problems


@over(2)
def test_what_the_user_has_set_holds(rank: int, size: int) -> None:
    """What a user has set stands after a step as it did, and the parameters are sharded again."""
    mesh, data = meshed(size, size), models.batch(2, seed=rank)
    model = wrapped("blocks", mesh)
    expected = own_loop(wrapped("blocks", mesh), data, 2, size)
    for module in sharded(model):
        module.set_gradient_divide_factor(7.0)
        module.set_requires_gradient_sync(False)
    engine = engine_over(model, programs(2)[0], mesh)
    engine.step(data[0], target=data[1])
    problems = [name for name, p in model.named_parameters() if not isinstance(p, DTensor) or p.grad is not None]
    assert {group.gradient_divide_factor for group in engine.connection.sharding.groups} == {7.0}
    for module in sharded(model):
        module.set_requires_gradient_sync(True)
    engine.step(data[0], target=data[1])
    twice = {name: 2 * gradient for name, gradient in expected.items()}
    for name, gradient in models.gradients(model).items():
        if float((gradient - twice[name]).norm()) > 1e-5 * float(twice[name].norm()):
            problems.append(f"{name}: both steps' gradients are not reduced together")
    assert not problems, problems


@over(2)
def test_a_step_after_one_that_failed_is_right(rank: int, size: int) -> None:
    """A step that fails leaves no gradient behind, and that of another engine is right."""
    mesh, data = meshed(size, size), models.batch(3, seed=rank)
    expected = own_loop(wrapped("blocks", mesh), data, 3, size)
    model, calls = wrapped("blocks", mesh), []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        calls.append(output)
        if len(calls) == 3:
            raise ArithmeticError("the third loss")
        return models.loss_fn(output, target)

    engine = engine_over(model, programs(3)[0], mesh, loss_fn=loss_fn)
    with pytest.raises(ArithmeticError, match="the third loss"):
        engine.step(data[0], target=data[1])
    assert all(isinstance(p, DTensor) and p.grad is None for p in model.parameters())
    engine_over(model, programs(3)[0], mesh).step(data[0], target=data[1])
    problems = models.equal(models.gradients(model), expected)

    def no_loss(output: Tensor, target: Tensor) -> Tensor:
        raise ArithmeticError("no loss")

    engine = engine_over(model, programs(3)[0], mesh, loss_fn=no_loss)
    with pytest.raises(ArithmeticError, match="no loss"):
        engine.evaluate(data[0], target=data[1])
    problems += models.equal(models.gradients(model), expected)
    assert not problems, problems


@pytest.mark.skipif(torch.__version__ < "2.13", reason="one buffer before torch 2.13")
@over(2)
def test_gathers_are_throttled_and_streams_shared(rank: int, size: int) -> None:
    """Gathers under way, buffers of reductions, and streams: one set for all blocks."""
    mesh, data, problems = meshed(size, size), models.batch(3, seed=rank), []
    expected = own_loop(wrapped("blocks", mesh, layers=4), data, 3, size)
    model = wrapped("blocks", mesh, layers=4)
    buffers: set[int] = set()

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        buffers.update(group.comm_ctx.reduce_scatter_max_input_buffers for group in groups)
        return models.loss_fn(output, target)

    engine = engine_over(model, programs(3)[0], mesh, loss_fn=loss_fn)
    groups = engine.connection.sharding.groups
    most = 0

    def counting(gather: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            nonlocal most
            result = gather(*args, **options)
            most = max(most, sum(group._all_gather_result is not None for group in groups))
            return result

        return counted

    for group in groups:
        group.unshard = counting(group.unshard)
    engine.step(data[0], target=data[1])
    assert len(groups) > 8
    if most > 1 + AHEAD:
        problems.append(f"{most} gathers under way")
    if len({id(group.comm_ctx) for group in groups}) != 1:
        problems.append("several communication contexts")
    if buffers != {2} or groups[0].comm_ctx.reduce_scatter_max_input_buffers != 1:
        problems.append(f"{buffers} buffers in a step, {groups[0].comm_ctx.reduce_scatter_max_input_buffers} after it")
    problems += models.equal(models.gradients(model), expected)
    assert not problems, problems


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
BY_NODES: list[tuple[str, MixedPrecisionPolicy | None, dict[str, Any]]] = [
    ("blocks", None, {}),
    *wide(("root", None, {"tied": True}), ("blocks", BF16, {"block": Frozen}), ("replicate", BF16, {})),
]


class Watched:
    """The most blocks of an engine that are gathered, or coming, at once, and the most bytes of those that are there.

    ``held`` has the bytes of each block's parameters.
    """

    def __init__(self, engine: Engine) -> None:
        self.here: dict[Any, Any] = {}
        self.most = self.bytes = 0
        self.whole: dict[Any, list[Tensor]] = {}
        for place, modules in engine.connection.sharding.of_block.items():
            groups = [group for module in modules for group in fsdp._groups(module)]
            self.whole[place] = [t for group in groups for one in group.fsdp_params for t in one.all_gather_outputs]
            for group in groups:
                group.unshard = self.noting(group.unshard, group, place)
                group.wait_for_unshard = self.noting(group.wait_for_unshard, group, place)
                group.reshard = self.noting(group.reshard, group, None)
        self.held = {place: sum(t.numel() * t.itemsize for t in tensors) for place, tensors in self.whole.items()}

    def noting(self, call: Callable[..., Any], group: Any, place: Any) -> Callable[..., Any]:
        def noted(*args: Any, **options: Any) -> Any:
            self.here[group] = place
            self.most = max(self.most, len(set(self.here.values()) - {None}))
            result = call(*args, **options)
            there = (t.untyped_storage().nbytes() for tensors in self.whole.values() for t in tensors)
            self.bytes = max(self.bytes, sum(there))
            return result

        return noted


@pytest.mark.skipif(torch.__version__ < "2.13", reason="mixed precision is refused before torch 2.13")
@pytest.mark.parametrize(("wrap", "policy", "options"), BY_NODES)
@over(2)
def test_nodes_gather_two_blocks_at_a_time(
    rank: int, size: int, wrap: str, policy: MixedPrecisionPolicy | None, options: dict[str, Any]
) -> None:
    """Gradients equal FSDP2's own to the bit; a step that failed leaves nothing behind, and evaluations mix."""
    mesh, data, problems = meshed(size, size), models.batch(3, seed=rank), []
    expected = own_loop(wrapped(wrap, mesh, policy=policy, layers=3, **options), data, 3, size)

    def no_loss(output: Tensor, target: Tensor) -> Tensor:
        raise ArithmeticError("a loss")

    for program, overlap in zip(programs(3), OVERLAPS[::-1], strict=True):
        model = wrapped(wrap, mesh, policy=policy, layers=3, **options)
        if overlap == "pairs":
            engine = engine_over(model, program, mesh, loss_fn=no_loss, costs=None, memory="1TB")
            engine.plan = compile(program, engine.shapes, COSTS, overlap)
            with pytest.raises((ArithmeticError, RuntimeError)):
                engine.step(data[0], target=data[1])
        engine = engine_over(model, program, mesh, costs=None, memory="1TB")
        engine.plan = plan = compile(program, engine.shapes, COSTS, overlap)
        watched = Watched(engine)
        engine.step(data[0], target=data[1])
        blocks = len({place for place in engine.connection.sharding.of_block if place[1]})
        problems += [f"{program.name} {overlap}: {name}" for name in models.equal(models.gradients(model), expected)]
        problems += [] if blocks >= 4 and plan.gathered(0) == watched.most == 2 else [f"{watched.most} of {blocks}"]
        assert all(isinstance(p, DTensor) for p in model.parameters())
        if overlap != 3:
            continue
        loss = engine.mean_loss(engine.evaluate(data[0], target=data[1]))
        model.zero_grad()
        engine.step(data[0], target=data[1])
        problems += models.equal(models.gradients(model), expected)
        whole = engine_over(model, program, mesh)
        problems += [] if loss == whole.mean_loss(whole.evaluate(data[0], target=data[1])) else ["the loss"]
    assert not problems, problems


@over(2)
def test_a_module_of_two_blocks_stays_gathered(rank: int, size: int) -> None:
    mesh, data, found = meshed(size, size), models.batch(3, seed=rank), []
    for by_nodes in (False, True):
        model = models.build(mesh.get_group("ep"))
        model.insert(3, nn.Sequential(model[2][1], nn.Linear(models.H, models.H)))  # type: ignore[index]
        for module in (model[2][1], *model, model):  # type: ignore[index]
            fully_shard(module, mesh=mesh["dp"])
        engine = engine_over(model, programs(3)[1], mesh, **({"costs": None, "memory": "1TB"} if by_nodes else {}))
        if by_nodes:
            engine.plan = compile(engine.program, engine.shapes, COSTS, 3)
        engine.step(data[0], target=data[1])
        found.append(models.gradients(model))
    held = engine.connection.sharding.of_block.items()
    assert {place: len(modules) for place, modules in held} == {(0, b): 1 for b in range(6)}
    assert engine.plan.gathered(0) == 2
    problems = models.equal(*found)
    assert not problems, problems


def joined(mesh: DeviceMesh, program: Program, *over: str) -> DeviceMesh:
    """The ranks along some dimensions, with those of the pipeline that hold the same stages, in one dimension."""
    names = ("pp", *over) if len(program.placement.replicas(0)) > 1 else over
    order = sorted(("pp", "dp", "ep"), key=lambda name: name in names)
    ranks = mesh.mesh.permute([("pp", "dp", "ep").index(name) for name in order])
    size = math.prod(mesh[name].size() for name in names)
    return DeviceMesh("cpu", ranks.reshape(-1, size), mesh_dim_names=("rest", "shards"))["shards"]


def staged(mesh: DeviceMesh, program: Program, plain: Sequence[int] = ()) -> nn.Sequential:
    """A model of seven blocks over stages, each sharded over the ranks that hold it unless it is plain."""
    model = models.build(mesh.get_group("ep"), layers=4)
    every, same = joined(mesh, program, "dp", "ep"), joined(mesh, program, "dp")
    for block in (block for index, block in enumerate(model) if index not in plain):
        for experts in getattr(block, "experts", ()):
            fully_shard(experts, mesh=same)
        fully_shard(block, mesh=every)
    return model


@pytest.mark.wide  # nodes that gather are above, and shards over stages below
@pytest.mark.parametrize("ranks", [4, 8])
@over(lambda ranks: ranks, timeout=200)
def test_nodes_gather_over_stages_that_share_experts(rank: int, size: int, ranks: int) -> None:
    """Two stages, each over two ranks that share the experts, and two such: the gradients of whole parameters."""
    mesh = init_device_mesh("cpu", (2, size // 4, 2), mesh_dim_names=("pp", "dp", "ep"))
    data, found = models.batch(4, seed=rank % (size // 2)), []
    program = build_schedule("zb_h1", ranks=2, microbatches=4)
    for by_nodes in (False, True):
        model = staged(mesh, program)
        engine = engine_over(model, program, mesh, **({"costs": None, "memory": "1TB"} if by_nodes else {}))
        if by_nodes:
            engine.plan = compile(program, engine.shapes, COSTS, 3)
            watched = Watched(engine)
        engine.step(data[0], target=data[1])
        found.append(models.held(engine, model))
    assert watched.most == 2 < len(engine.connection.sharding.of_block)
    problems = models.equal(*found)
    assert not problems, problems


@over(2, timeout=100)
def test_a_limit_decides_how_many_blocks_are_gathered_at_once(rank: int, size: int) -> None:
    """All for the whole step where there is room, fewer where these do not fit, and never more bytes than these have.

    Bytes of gathers alone are limited and counted. What lanes free at any time is not, such as summed gradients.
    """
    mesh, data, problems, at_once = meshed(size, size), models.batch(3, seed=rank), list[str](), []
    program, options = programs(3)[0], {"costs": None, "memory": "1TB", "tries": 0, "verify": False}
    expected = own_loop(wrapped("blocks", mesh, layers=4), data, 3, size)
    engine = engine_over(wrapped("blocks", mesh, layers=4), program, mesh, **options)
    while engine.tuner.settling:
        engine.step(data[0], target=data[1])
    gathers = {key: of for key, of in engine.costs.bytes.items() if key[0] in (Op.GATHER, Op.RELEASE)}
    whole = Watched(engine).held
    for place, size_of in whole.items():
        kept = [gathers[op, Kind.W, *place, 0, 0].kept for op in (Op.GATHER, Op.RELEASE)]
        problems += [] if kept == [size_of, -size_of] else [f"{place} of {size_of} bytes keeps {kept}"]
    costs = replace(COSTS, by_op={**COSTS.by_op, (Op.GATHER, Kind.W): 6.0}, bytes=gathers)
    for room in (math.inf, 5.0, 3.1):  # in bytes of the largest block; one more for the buffer of the gather that ends
        model = wrapped("blocks", mesh, layers=4)
        engine = engine_over(model, program, mesh, **options)
        engine.tuner.counted = engine.tuner.counted._replace(rooms=(room * max(whole.values()),))
        engine.costs = costs
        watched = Watched(engine)
        engine.step(data[0], target=data[1])
        at_once.append(engine.plan.gathered(0))
        problems += models.equal(models.gradients(model), expected)
        if watched.most > at_once[-1] or watched.bytes > at_once[-1] * max(whole.values()):
            problems.append(f"{watched.most} blocks, {watched.bytes} bytes where the plan has {at_once[-1]}")
    assert not problems, problems
    assert at_once == [len(whole), 3, 2], at_once


@pytest.mark.parametrize("options", [{}, *wide({"costs": None, "memory": "1TB"})])
@over(2, timeout=50)
def test_a_rank_that_fails_early_holds_nobody_up(rank: int, size: int, options: dict[str, Any]) -> None:
    """One rank fails in its first block: the other has more gathers under way, which must not hold it up."""
    mesh, data = meshed(size, size), models.batch(3, seed=rank)
    model = wrapped("blocks", mesh, layers=4)
    engine = engine_over(model, programs(3)[0], mesh, timeout=100, **options)

    def fails(*_: Any) -> None:
        if rank == 1:
            raise ArithmeticError("the first block")

    model[0].register_forward_hook(fails)
    with pytest.raises((ArithmeticError, RuntimeError)):
        engine.step(data[0], target=data[1])
    assert all(isinstance(p, DTensor) and p.grad is None for p in model.parameters())


@over(2)
def test_gathering_has_the_engines_limit(rank: int, size: int) -> None:
    """One rank is late for the gathering of FSDP2, whose process groups wait by a limit of torch's: a minute here."""
    mesh, data = meshed(size, size), models.batch(3, seed=rank)
    engine = engine_over(wrapped("blocks", mesh), programs(3)[0], mesh, timeout=1.0)
    if rank == 1:
        gather = engine.connection.sharding.gather
        engine.connection.sharding.gather = lambda *given: (time.sleep(2.5), gather(*given))  # type: ignore[assignment,func-returns-value]
    start = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        engine.step(data[0], target=data[1])
    assert any(f" {rank} failed " in note for note in raised.value.__notes__), raised.value.__notes__
    assert time.monotonic() - start < 20


@over(2)
def test_reductions_travel_while_the_thread_computes(rank: int, size: int) -> None:
    """No reduction ends before the last node of compute, which yet is reached: they hold up another thread."""
    mesh, data = meshed(size, size), models.batch(3, seed=rank)
    expected, done = own_loop(wrapped("blocks", mesh), data, 3, size), threading.Event()
    model = wrapped("blocks", mesh)
    engine = engine_over(model, programs(3)[0], mesh, verify=False)
    computed = [node for node in engine.plan.ranks[0] if node.resource is Resource.COMPUTE]
    reductions = [index for index, node in enumerate(engine.plan.ranks[0]) if node.op is Op.REDUCE]
    assert reductions[-2] < engine.plan.ranks[0].index(computed[-1])

    @contextmanager
    def last(node: Node) -> Iterator[None]:
        yield
        if node == computed[-1]:
            done.set()

    engine.observers.append(Around(last))
    reached = []
    for group in engine.connection.sharding.groups:

        def late(reduce: Callable[[], None] = group.post_backward) -> None:
            reached.append(done.wait(10))
            reduce()

        group.post_backward = late
    engine.step(data[0], target=data[1])
    assert not models.equal(models.gradients(model), expected)
    assert reached == [True] * 7, reached


@pytest.mark.parametrize(
    ("name", "shape"),
    [("zb_v", (2, 2, 1)), *wide(("dualpipe", (2, 2, 1)), ("1f1b", (1, 2, 2)), ("interleaved_1f1b", (2, 1, 2)))],
)
@over(4)
def test_stages_over_four_ranks_equal_the_plain_engine(
    rank: int, size: int, name: str, shape: tuple[int, int, int]
) -> None:
    """Shards of experts count once in the norm, too.

    Two steps that add up, an evaluation, and the norm, of which every parameter is a part once.
    """
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "ep"))
    program = build_schedule(name, ranks=shape[0], microbatches=4)
    _, *at = mesh.get_coordinate() or ()
    data = [models.batch(4, seed=10 * step + at[0] * shape[2] + at[1]) for step in range(2)]
    found, losses, norms = [], [], []
    for shards in (False, True):
        model = staged(mesh, program, plain=(2,) if shards else range(7))  # one is reduced by the engine
        engine = engine_over(model, program, mesh)
        for inputs, target in data:
            engine.step(inputs, target=target)
        losses.append(engine.mean_loss(engine.evaluate(data[0][0], target=data[0][1])))
        before = models.held(engine, model)
        norms.append(float(engine.clip_gradients(0.1)))
        found.append(before | {f"{name} clipped": grad for name, grad in models.held(engine, model).items()})
    assert norms[0] > 0.2
    problems = [f"{what} {a} and {b}" for what, (a, b) in (("loss", losses), ("norm", norms)) if abs(a - b) > 1e-5 * a]
    if shape[1:] == (2, 1) and len(program.placement.replicas(0)) == 1:  # two addends: the same in either order
        problems += [name for name in models.equal(*found) if "clipped" not in name]
    problems += [
        f"{name} differs"
        for name, grad in found[0].items()
        if float((grad - found[1][name]).norm()) > 1e-5 * float(grad.norm())
    ]
    assert not problems, problems


@pytest.mark.parametrize("ranks", [2, *wide(4)])
@over(lambda ranks: ranks)
def test_replicated_shards_count_once_in_the_norm(rank: int, size: int, ranks: int) -> None:
    """Where shards lie on several ranks each."""
    mesh, norms = meshed(size, 2), []
    data = models.batch(3, seed=rank)
    for wrap in (None, "hybrid", "replicate"):
        model = models.build(mesh.get_group("ep")) if wrap is None else wrapped(wrap, mesh)
        engine = engine_over(model, programs(3)[0], mesh)
        engine.step(data[0], target=data[1])
        kinds = ((1e9, math.inf), (0.1, 2.0), (1.0, 2.0))
        norms += [float(engine.clip_gradients(most, norm_type)) for most, norm_type in kinds]
    assert norms[::3] == pytest.approx(norms[:1] * 3), norms
    assert norms[1::3] == pytest.approx(norms[1:2] * 3), norms
    assert norms[2::3] == pytest.approx([0.1] * 3, rel=1e-4), norms


@over(2)
def test_what_would_be_reduced_wrongly_is_refused(rank: int, size: int) -> None:
    mesh, program = meshed(size, 1), programs(2)[0]
    model = models.build(mesh.get_group("ep"))
    for block in model:
        fully_shard(block, mesh=init_device_mesh("cpu", (size,)))
    with pytest.raises(ValueError, match=rf"experts of FSDPBlock over ranks \[0, 1\]; allowed: \[{rank}\], whose"):
        engine_over(model, program, mesh)
    with pytest.raises(ValueError, match="reduce=False over FSDP2; allowed: set_requires_gradient_sync"):
        engine_over(wrapped("blocks", mesh), program, mesh, reduce=False)
    model = wrapped("root", meshed(size, size))
    with pytest.raises(ValueError, match=r"parameter weight of Embedding is sharded by a module around the blocks"):
        engine_over(list(model), program, meshed(size, size))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ranks", "sub", "wrap"),
    [(2, (), "none"), *wide((4, ("ep",), "none"), (4, ("dp",), "both"), (4, ("dp", "ep"), "both"))],
)
@over(lambda ranks, *_: ranks)
def test_ranks_that_share_a_tensor_beside_the_engine_are_refused(
    rank: int, size: int, ranks: int, sub: tuple[str, ...], wrap: str
) -> None:
    """A Linear that another part of the mesh shares."""
    shape = {2: (1, 1, 2), 4: (1, 2, 2) if "ep" in sub else (2, 1, 2)}[size]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep", "tp"))
    model = models.build(mesh.get_group("ep"))
    parallelize_module(model[2], mesh["tp"], {"1": ColwiseParallel()})
    if wrap == "both":
        fully_shard(model[2], mesh=mesh["dp", "ep"]._flatten("data"))
    given: Any = mesh[sub] if sub else None
    together, own = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2] if size == 4 else [rank]
    message = (
        f"parameter 2.1.weight of Sequential is a DTensor over 'tp' of ranks {together}, which is not FSDP2's over "
        f"the engine's ranks {own}; allowed: FSDP2 over these ranks, tensor parallelism over the mesh's dimension "
        "'tp', experts over its 'ep'"
    )
    with pytest.raises(ValueError, match=rf"^{re.escape(message)}(\n|$)"):
        engine_over(model, programs(2)[0], given)


@over(2)
def test_tensor_parallelism_over_the_engines_ranks_is_refused(rank: int, size: int) -> None:
    """The engine's own ranks, one of another order, and one alone."""
    for given in (DeviceMesh("cpu", [1, 0], mesh_dim_names=("ep",)), init_device_mesh("cpu", (size,))):
        model = models.build(None)
        parallelize_module(model[2], given, {"1": ColwiseParallel()})
        what = "'ep' of ranks [1, 0]" if given.mesh_dim_names else "dimension 0 of ranks [0, 1]"
        with pytest.raises(ValueError, match=rf"1\.weight of Sequential is a DTensor over {re.escape(what)}, which is"):
            engine_over(model, programs(2)[0], init_device_mesh("cpu", (size,), mesh_dim_names=("dp",)))
    mesh, data = init_device_mesh("cpu", (size, 1), mesh_dim_names=("dp", "tp")), models.batch(3, seed=rank)
    found = []
    for alone in (False, True):
        model = models.build()
        if alone:  # as in a job whose tensor parallelism is set to one rank
            parallelize_module(model[2], mesh["tp"], {"1": ColwiseParallel()})
        for block in model:
            fully_shard(block, mesh=mesh["dp"])
        engine_over(model, programs(3)[0], mesh["dp"]).step(data[0], target=data[1])
        found.append(models.gradients(model))
    assert not models.equal(*found)
    frozen = models.build()
    frozen[0].requires_grad_(False)
    fully_shard(frozen[0], mesh=mesh["dp"])
    with pytest.raises(ValueError, match=rf"parameter 0\.weight of Sequential is a DTensor over 'dp' .* \[{rank}\]; a"):
        engine_over(frozen, programs(2)[0], None)


class Slice(nn.Module):
    """One expert a rank along "ep", a slice of a DTensor."""

    def __init__(self, mesh: DeviceMesh, placement: Placement) -> None:
        super().__init__()
        whole = torch.randn(mesh["ep"].size(), models.H, models.H)
        self.weight = nn.Parameter(distribute_tensor(whole, mesh["ep"], [placement]))

    def forward(self, rows: Tensor) -> Tensor:
        weight: Any = self.weight
        return (rows @ weight.to_local()[0]).tanh()


class Sliced(nn.Module):
    """Every rank along "ep" gets an equal part of the tokens."""

    def __init__(self, mesh: DeviceMesh, placement: Placement) -> None:
        super().__init__()
        self.group, self.norm, self.experts = mesh.get_group("ep"), nn.LayerNorm(models.H), Slice(mesh, placement)

    def forward(self, x: Tensor) -> Tensor:
        rows = exchange(self.norm(x).flatten(0, -2), None, None, self.group)
        return x + exchange(self.experts(rows), None, None, self.group).view_as(x)


def sliced(mesh: DeviceMesh, placement: Placement) -> nn.Sequential:
    torch.manual_seed(2)
    model = nn.Sequential(Sliced(mesh, placement), Sliced(mesh, placement))
    every = mesh["dp", "ep"]._flatten()
    for block in model:
        fully_shard(block.experts, mesh=mesh["dp"])
        fully_shard(block, mesh=every)
    return model


@over(4)
def test_experts_that_are_slices_of_a_tensor_equal_fsdp2_bit_for_bit(rank: int, size: int) -> None:
    """Their gradients are summed over the ranks along "dp" alone; a copy on each rank along "ep" is refused."""
    mesh, generator = meshed(size, 2), torch.Generator().manual_seed(rank)
    x, y = torch.randn(2, 4 * 2, 6, models.H, generator=generator)
    loss_fn = nn.functional.mse_loss
    expected, model = own_loop(sliced(mesh, Shard(0)), (x, y), 4, size, loss_fn), sliced(mesh, Shard(0))
    engine = engine_over(model, build_schedule("combined_1f1b", microbatches=4), mesh, loss_fn=loss_fn)
    problems = []
    for step in range(3):  # the first finds the exchanges
        model.zero_grad()
        engine.step(x, target=y)
        problems += [f"step {step}: {name}" for name in models.equal(models.gradients(model), expected)]
    with pytest.raises(ValueError, match=r"experts\.weight of Sequential is a DTensor over 'ep' of ranks"):
        engine_over(sliced(mesh, Replicate()), build_schedule("combined_1f1b", microbatches=4), mesh, loss_fn=loss_fn)
    assert not problems, problems
