"""Activations that go to host memory and come back: the same gradients, and fewer bytes meanwhile."""

from __future__ import annotations

import gc
import re
import threading
from contextlib import nullcontext
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from overlap1f1b.engine import Engine, StepResult
from overlap1f1b.learn.memory import peak_bytes
from overlap1f1b.plan import MOVES, NodeCosts, Op, Overlap, Recompute
from overlap1f1b.schedule import build_schedule
from overlap1f1b.transport import devices
from overlap1f1b.transport.exchange import build_exchange
from overlap1f1b.transport.host import HostMemory
from tests import models
from tests.engine.test_engine import Delayed, step
from tests.engines import COSTS, make, said_of
from tests.pauses import pauses
from tests.ranks import Ranks, over
from tests.tiers import wide

MODES: list[Recompute] = ["none", "experts", "attention", "block"]
PROGRAMS = ["sequential", "combined_1f1b", "zb_h1", "afab"]
OVERLAPS: list[Overlap] = ["serial", "pairs", 1, 3]
ALL: dict[str, Any] = {"offload": True, "offload_threshold": 0, "verify": False}


def moved(result: StepResult, op: Op = Op.OFFLOAD) -> int:
    """Bytes that have gone to host memory in a step, or come back."""
    return sum(flight.sent for flight in result.times.flights if flight.node.op is op)


def gradients(
    name: str, overlap: Overlap, microbatches: int, given: dict[str, Any], **options: Any
) -> tuple[dict[str, Tensor], StepResult]:
    model = models.build(**options)
    torch.manual_seed(2)
    program = build_schedule(name, microbatches=microbatches)  # type: ignore[arg-type]
    _, result = step(model, program, overlap, models.batch(microbatches), **{"verify": False} | given)
    return models.gradients(model), result


@pytest.mark.parametrize(("expert_calls", "microbatches"), [(1, 3), (2, 2), *wide((1, 1), (2, 5))])
def test_gradients_and_dropout_are_those_without(expert_calls: int, microbatches: int) -> None:
    """Uneven routing, an expert without tokens, a dense block and tied weights are in every case.

    Programs meet overlaps, both meet the modes of recompute, and numbers of parts.
    """
    options: dict[str, Any] = {"expert_calls": expert_calls, "dropout": 0.3, "tied": True}
    expected = {
        parts: gradients("sequential", "serial", microbatches, {"parts": parts}, **options)[0] for parts in (1, 2)
    }
    for (first, name), (second, overlap) in product(enumerate(PROGRAMS), enumerate(OVERLAPS)):
        given = {"recompute": MODES[(first + second) % 4], "parts": 1 + first % 2} | ALL
        found, result = gradients(name, overlap, microbatches, given, **options)
        assert not models.equal(found, expected[given["parts"]]), (name, overlap, given)
        assert moved(result) == moved(result, Op.FETCH)
        assert moved(result) > 0


@pytest.mark.parametrize("cast", [False, True])
def test_measured_steps_and_an_evaluation_in_between(cast: bool) -> None:
    """Costs of the copies are measured; plans are compared with a plain loop that keeps everything."""
    data, found = models.batch(3), []
    for given in ({}, ALL | {"verify": True}):
        model = models.build()
        engine = make(model, build_schedule("combined_1f1b", microbatches=3), tries=1, **given)
        for _ in range(5):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                engine.evaluate(data[0], target=data[1])
                result = engine.step(data[0], target=data[1])
        found.append(models.gradients(model))
    assert not models.equal(*found)
    assert {key[0] for key, cost in engine.costs.by_node.items() if key[0] in MOVES and cost} == {Op.OFFLOAD, Op.FETCH}
    assert moved(result)
    assert result.metrics()["offloaded_bytes"] == moved(result)


@pytest.mark.parametrize(("ranks", "microbatches", "seeds"), [(2, 3, 3), *wide((4, 4, 4), (2, 3, 200))])
@over(lambda ranks, *_: ranks, timeout=500)
def test_ranks_of_random_delays(rank: int, size: int, ranks: int, microbatches: int, seeds: int) -> None:
    """Threads pause where they meet, exchanges and copies take as long as they like."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    group, data, expected = mesh.get_group("ep"), models.batch(microbatches, seed=rank), dict[str, Tensor]()
    exchange, problems = Delayed(build_exchange(group), seed=rank), []
    for seed in range(seeds + 1):
        model = models.build(group, dropout=0.2)
        torch.manual_seed(7)
        given = ALL | {"recompute": MODES[seed % 4], "host_link": 0.05 + seed % 3} if seed else {"verify": False}
        program = build_schedule(PROGRAMS[seed % 3], microbatches=microbatches)  # type: ignore[arg-type]
        with pauses(seed):
            step(model, program, 3, data, mesh=mesh, exchange=exchange, timeout=20, **given)
        found = models.gradients(model)
        expected = expected or found
        problems += [f"{seed}: {name}" for name in models.equal(found, expected)]
    assert not problems, problems


@over(2)
def test_sharded_parameters_stay(rank: int, size: int) -> None:
    """FSDP2 gathers and frees them itself: saved for the backward, and there when a block is computed again."""
    mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("pp", "dp", "ep"))
    data, found = models.batch(2, seed=rank), []
    for given in ({"verify": False}, {"verify": False, "recompute": "block"}, ALL):
        model = models.build(layers=1)
        for block in model:
            fully_shard(block, mesh=mesh["dp"])
        program = build_schedule("combined_1f1b", microbatches=2)
        _, result = step(model, program, 2, data, mesh=mesh, timeout=20, **given)
        found.append({n: p.grad.to_local().clone() for n, p in model.named_parameters() if p.grad is not None})  # type: ignore[attr-defined]
    assert moved(result)
    assert found[0]
    problems = models.equal(found[1], found[0]) + models.equal(found[2], found[0])
    assert not problems, problems


# ------------------------------------------------------------------------------------------------------ what is moved


class Saves(nn.Module):
    """Saves tensors of 4 · [8, 16] bytes, as ``what`` says."""

    def __init__(self, what: str = "") -> None:
        super().__init__()
        self.weight, self.what = nn.Parameter(torch.ones(16)), what

    def forward(self, x: Tensor) -> Tensor:
        y = (x * self.weight).exp()  # its output is saved, as is the input, which is another block's or the batch
        if self.what == "again":
            return y.sin() + y.cos() + y.view(-1).tanh().view(8, 16)  # y, twice more and as a view, and tanh's output
        if self.what == "held":
            self.held = y
        if self.what == "storage":
            self.storage = y.untyped_storage()
        if self.what in ("shared", "lazy"):
            y = y.sin() * (torch.ones_like(y).share_memory_() if self.what == "shared" else torch._lazy_clone(y))
        if self.what == "shown":
            self.node = y.grad_fn
        if self.what == "in place":
            z = y.sin()
            y.mul_(2)
            return z
        if self.what == "parameter":
            with torch.no_grad():
                self.weight.mul_(2)
        if self.what == "alias":  # its backward comes before that of the other use
            return y.sin() + CosineInPlace.apply(y)
        if self.what == "grad":
            y = y + torch.func.grad(lambda z: z.sin().sum())(y)
        if self.what == "elsewhere":
            y = OfAnotherDevice.apply(y)
        if self.what == "jvp":
            y = y + torch.func.jvp(torch.tanh, (y,), (torch.ones_like(y),))[1]
        if self.what == "hooks":
            with saved_tensors_hooks(lambda t: (t, "the model's own"), lambda kept: kept[0]):
                return y.sin() + y.cos()
        return y * 1.0


class CosineInPlace(torch.autograd.Function):
    """A sine whose backward computes in the memory of what it has saved, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.cos_()


class OfAnotherDevice(torch.autograd.Function):
    """Saves what is on another device than the model."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.to("meta"), x + 1)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        assert [one.device.type for one in ctx.saved_tensors] == ["meta", "cpu"]
        return grad * 2


def engine_of(*blocks: nn.Module, **given: Any) -> Engine:
    program = build_schedule("afab", microbatches=2)
    options = {"loss_fn": lambda y, _: y.sum(), "costs": COSTS, "overlap": "serial"} | ALL | given
    return make(list(blocks), program, **options)


@pytest.mark.parametrize(
    ("what", "given", "tensors"),
    [
        ("", {}, 1),
        ("again", {}, 2),
        ("held", {}, 0),
        ("storage", {}, 0),
        ("shared", {}, 1),  # the output of exp
        ("lazy", {}, 1),  # that of sin
        ("hooks", {}, 0),
        ("elsewhere", {}, 2),  # the copy of x, and exp's output
        ("again", {"offload_threshold": 513}, 0),
        ("again", {"offload_threshold": 512}, 2),
        ("again", {"recompute": "block"}, 0),
    ],
)
def test_what_the_graph_alone_holds_travels_once(what: str, given: dict[str, Any], tensors: int) -> None:
    """Weights, the batch, outputs, what the model's own hooks took, and what somebody holds stay."""
    x = torch.randn(16, 16)
    engine = engine_of(Saves(what), **given)
    assert moved(engine.step(x, target=x)) == 2 * tensors * 512


def test_hooks_around_a_step_take_everything() -> None:
    packed, x = [], torch.randn(16, 16)
    with saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        result = engine_of(Saves()).step(x, target=x)
    assert packed
    assert not moved(result)


@pytest.mark.parametrize(("what", "shape"), [("in place", "8, 16"), ("parameter", "16"), ("alias", "8, 16")])
def test_a_change_of_what_was_saved_is_refused_as_torch_refuses_it(what: str, shape: str) -> None:
    x = torch.randn(16, 16, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Saves(what)(x[:8]).sum().backward()
    says = rf"block 1 \(Saves\) changes in place a tensor of \[{shape}\] that its backward needs; allowed"
    with pytest.raises(RuntimeError, match=says):
        engine_of(Saves(), Saves(what), verify=False).step(x.detach(), target=x)


def test_tangents_have_no_memory_that_could_leave() -> None:
    x, block = torch.randn(16, 16), Saves("jvp")
    engine_of(block).step(x, target=x)
    own = Saves("jvp")
    for part in x.split(8):
        (own(part).sum() / 2).backward()
    assert torch.equal(block.weight.grad, own.weight.grad)


def test_transforms_of_torch_func_are_refused_in_a_line() -> None:
    x, engine = torch.randn(16, 16), engine_of(Saves())
    wanted = r"^block 0 \(Saves\) calls torch\.func\.grad.*; allowed: offload=False and recompute='none', or .*grad\n"
    with pytest.raises(ValueError, match=wanted):
        engine_of(Saves("grad")).step(x, target=x)
    with pytest.raises(ValueError, match=r"^a step inside a transform of torch\.func.*; allowed: .*\n"):
        torch.func.grad(lambda z: engine.step(z, target=z).loss)(x)


def test_threads_of_copies_end_with_close() -> None:
    x, others = torch.randn(16, 16), set(threading.enumerate())
    with engine_of(Saves()) as engine:
        assert moved(engine.step(x, target=x))
        copying = [one for one in threading.enumerate() if one not in others]
    assert {"overlap1f1b-offload", "overlap1f1b-fetch"} <= {one.name for one in copying}
    for one in copying:
        one.join(10)
    assert not any(one.is_alive() for one in copying)
    with pytest.raises(RuntimeError, match=r"^this engine is closed; allowed: a new one, on all ranks$"):
        engine.step(x, target=x)


def test_what_is_computed_again_from_leaves_too() -> None:
    """The input of the second block; that of the first is the batch."""
    x = torch.randn(16, 16)
    result = engine_of(Saves(), Saves(), recompute="block").step(x, target=x)
    assert moved(result) == moved(result, Op.FETCH) == 2 * 512


def test_recompute_is_chosen_beside_it() -> None:
    """All modes are measured."""
    model, data = models.build(layers=2), models.batch(2)
    given: dict[str, Any] = {"recompute": "auto", "memory": "400MB", "tries": 0, **ALL}
    with make(model, build_schedule("afab", microbatches=2), **given) as engine:
        while engine.tuner.settling:
            engine.step(data[0], target=data[1])
        assert moved(engine.step(data[0], target=data[1]))


def test_a_wait_for_a_copy_is_no_compute() -> None:
    """Else its time would be measured as that of the segment."""
    x = torch.randn(16, 16)
    result = engine_of(Saves(), Saves("again"), host_link=1e-4).step(x, target=x)
    spans = {node: (start, end) for node, start, end in result.overlap.spans}
    fetched = [node for node in spans if node.op is Op.FETCH]
    assert len(fetched) == 4
    assert all(spans[node._replace(op=Op.DENSE)][0] >= spans[node][1] for node in fetched)


def test_what_is_away_is_not_shown() -> None:
    """A later block looks at what the graph of an earlier one has saved."""

    class Looks(Saves):
        def forward(self, x: Tensor) -> Tensor:
            node: Any = first.node
            return super().forward(x) + node._saved_result.sum()

    x, first = torch.randn(16, 16), Saves("shown")
    says = r"block 0 \(Saves\) has in host memory a tensor of \[8, 16\] that its backward needs; allowed: offload=False"
    with pytest.raises(RuntimeError, match=says):
        engine_of(first, Looks()).step(x, target=x)


@pytest.mark.parametrize("copy", [2, 8])
def test_what_is_looked_at_during_its_copy_stays(copy: float) -> None:
    """Later blocks take it from the graph, and use it after the copy."""

    class Looks(Saves):
        def forward(self, x: Tensor) -> Tensor:
            node: Any = first.node
            self.held = node._saved_result
            return super().forward(x)

    class Uses(Saves):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * looks.held.detach().sum()

    x, found = torch.randn(16, 16) / 16, []
    costs = NodeCosts.uniform(attention=3, experts=4, dispatch=5, dense=1, copy=copy)
    for given in ({"offload": False}, {"host_link": 1e-4}):
        first, looks = Saves("shown"), Looks()
        engine_of(first, looks, Saves(), Uses(), costs=costs, **given).step(x, target=x)
        found.append(models.gradients(nn.ModuleList([first, looks])))
    assert not models.equal(*found)


def test_what_is_being_fetched_is_not_shown() -> None:
    """Its memory is there again, and not filled yet."""

    class Looks(Saves):
        def forward(self, x: Tensor) -> Tensor:
            y, node = super().forward(x), first.node
            y.register_hook(lambda grad: grad * node._saved_result)
            return y

    first: Any = Saves("shown")
    x, costs = torch.randn(16, 16), NodeCosts.uniform(attention=3, experts=4, dispatch=5, dense=1, copy=8)
    engine = engine_of(first, Saves(), Looks(), Saves(), costs=costs, host_link=2e-5)
    order = [(node.op, node.block) for node in engine.plan.ranks[0]]
    assert order.index((Op.FETCH, 0)) < len(order) - order[::-1].index((Op.DENSE, 3)) - 1
    with pytest.raises(RuntimeError, match=r"^block 0 \(Saves\) has in host memory a tensor of"):
        engine.step(x, target=x)


def test_a_step_holds_less() -> None:
    """Of five microbatches that are open at once one is there at a time."""

    def peak(**given: Any) -> int:
        model = models.build(layers=2)
        given = {"overlap": "serial", "costs": COSTS, "verify": False} | given
        engine = make(model, build_schedule("afab", microbatches=5), **given)
        data = models.batch(5)
        engine.step(data[0], target=data[1])
        return peak_bytes(torch.device("cpu"), lambda: engine.step(data[0], target=data[1]))

    assert peak(**ALL) < 0.5 * peak()


# ------------------------------------------------------------------------------------------------------ failures


def test_nothing_to_save_and_a_gpu_without_pinned_memory() -> None:
    x = torch.randn(16, 16)
    engine = engine_of(Saves("held"), costs=None)
    engine.step(x, target=x)
    with pytest.raises(ValueError, match=r"^offload=True where no block saves 0 bytes or more .*; allowed: "):
        engine.step(x, target=x)
    with (
        patch.object(devices, "in_host_memory", side_effect=RuntimeError("no pinned memory")),
        pytest.raises(ValueError, match=r"^offload on cpu without pinned host memory; allowed: offload=False"),
    ):
        engine_of(Saves())


def _failing(rank: int, size: int, where: str) -> list[str]:
    mesh, told = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)), list[str]()
    model, data = models.build(mesh.get_group("ep")), models.batch(3, seed=rank)
    engine = make(model, build_schedule("combined_1f1b", microbatches=3), mesh=mesh, costs=COSTS, timeout=10, **ALL)
    error = MemoryError("no host memory") if where == "in_host_memory" else OSError("the link is down")
    of: Any = devices if where == "in_host_memory" else HostMemory
    with patch.object(of, where, side_effect=error) if rank else nullcontext():
        try:
            engine.step(data[0], target=data[1])
        except RuntimeError as failed:
            told.append(said_of(failed))
    gc.collect()
    return told


@pytest.mark.parametrize(
    ("where", "node", "why"),
    [
        ("in_host_memory", "free.f", "offload.f[1] m0 of block 1 (Block) failed: MemoryError: no host memory"),
        ("_carry", "free.f", "offload.f[1] m0 of block 1 (Block) failed: OSError: the link is down"),
        ("fetch", "dense.b", "fetch.b[4] m0 of block 4 (Linear) failed: OSError: the link is down"),
    ],
)
def test_a_host_without_memory_or_a_link_ends_the_step_on_all_ranks(
    ranks2: Ranks, where: str, node: str, why: str
) -> None:
    one, other = ranks2.run(_failing, where)
    assert len(one) == len(other) == 1
    assert re.search(rf"rank ep 1 failed at {node}\[.*{re.escape(why)}", one[0].splitlines()[0])
    assert other[0].splitlines()[0] == why
