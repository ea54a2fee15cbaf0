"""Gradients of the engine against plain autograd, on one rank and on several."""

import importlib
import math
import random
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from overlap1f1b.cut.options import EngineOptions
from overlap1f1b.engine import Engine, Feed
from overlap1f1b.moe import MoE, RouterConfig
from overlap1f1b.plan import Overlap, compile
from overlap1f1b.schedule import Program, build_schedule
from overlap1f1b.transport.exchange import CollectiveExchange, Exchange, Transfer, build_exchange
from overlap1f1b.transport.failures import LostRankError
from tests import models
from tests.engines import COSTS, make
from tests.ranks import over
from tests.tiers import wide

PROGRAMS = [("sequential", None), ("combined_1f1b", 0), ("combined_1f1b", 1), ("combined_1f1b", 3)]
OVERLAPS: list[Overlap] = ["serial", "pairs", 1, 2, 3]


def programs(microbatches: int) -> list[Program]:
    return [build_schedule(n, microbatches=microbatches, extra_warmup=w) for n, w in PROGRAMS]


def overlaps_of(number: int, every: bool) -> list[Overlap]:
    """All overlaps of a program, or two, with which programs take turns."""
    return OVERLAPS if every else [OVERLAPS[number % 5], OVERLAPS[(number + 2) % 5]]


def step(model: nn.Sequential, program: Program, overlap: Overlap, data: tuple[Tensor, Tensor], **options: Any) -> Any:
    engine = make(model, program, overlap=overlap, **{"costs": COSTS} | options)
    return engine, engine.step(data[0], target=data[1])


@pytest.mark.parametrize(
    ("expert_calls", "microbatches"),
    [(1, 4), (3, 3), *(pytest.param(*case, marks=pytest.mark.wide) for case in ((1, 1), (1, 2), (1, 7), (2, 4)))],
)
def test_one_rank_equals_plain_autograd_bit_for_bit(expert_calls: int, microbatches: int) -> None:
    """Four microbatches with one call a layer: every overlap, and a tied parameter, where autograd sums one call."""
    most = tied = (expert_calls, microbatches) == (1, 4)
    data, reference = models.batch(microbatches), None
    losses, expected = models.plain_gradients(models.build(expert_calls=expert_calls, tied=tied), *data, microbatches)
    for number, program in enumerate((*programs(microbatches), build_schedule("zb_h1", microbatches=microbatches))):
        for overlap in overlaps_of(number, most):
            model = models.build(expert_calls=expert_calls, tied=tied)
            engine, result = step(model, program, overlap, data, verify=False)
            where, found = (program.name, overlap, engine.plan.order), models.gradients(model)
            reference = reference or found
            assert not models.equal(found, reference), where
            if expert_calls > 1:  # they meet in one residual, whose sum autograd orders in its own way
                for name, gradient in found.items():
                    torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7, msg=f"{where} {name}")
            else:
                assert not models.equal(found, expected), where
            assert [float(x) for x in result.losses] == [float(x) for x in losses]
            assert result.peak_activations == engine.plan.live(0) <= program.peak_activations[0]
            assert result.peak_held == engine.plan.peak_held


def test_an_optimizer_steps_a_weight_that_blocks_share_once() -> None:
    data, weights = models.batch(4), list[dict[str, Tensor]]()
    for plain in (True, False):
        model = models.build(tied=True)
        engine = make(model, programs(4)[2], costs=COSTS)
        optimizer = torch.optim.AdamW(model.parameters() if plain else engine.parameters())
        for _ in range(2):
            models.plain_gradients(model, *data, 4) if plain else engine.step(data[0], target=data[1])
            optimizer.step()
            optimizer.zero_grad()
        weights.append({name: p.detach() for name, p in model.named_parameters()})
    assert not models.equal(*weights)


def test_dropout_is_the_same_in_every_program() -> None:
    data, reference = models.batch(4), None
    for number, program in enumerate(programs(4)):
        for overlap in overlaps_of(number, every=False):
            model = models.build(dropout=0.3)
            torch.manual_seed(2)
            step(model, program, overlap, data, verify=number == 1)
            found = models.gradients(model)
            reference = reference or found
            assert not models.equal(found, reference), (program.name, overlap)
    torch.manual_seed(3)
    model = models.build(dropout=0.3)
    torch.manual_seed(4)
    step(model, programs(4)[0], "serial", data)
    assert models.equal(models.gradients(model), reference or {}), "another seed drops something else"


def test_steps_add_to_gradients_and_costs_are_measured_in_the_first_two() -> None:
    data, model = models.batch(3), models.build()
    engine = make(model, programs(3)[2])
    orders = []
    for _ in range(3):
        orders.append(engine.plan.order)
        engine.step(data[0], target=data[1])
    assert orders[:2] == ["serial", "serial"]
    assert engine.costs is not None
    assert engine.plan.overlap == 3
    _, expected = models.plain_gradients(plain := models.build(), *data, 3)
    for _ in range(2):
        _, expected = models.plain_gradients(plain, *data, 3)
    assert not models.equal(models.gradients(model), expected)


def test_evaluate_gives_the_loss_and_touches_no_gradient() -> None:
    data, model = models.batch(3), models.build()
    engine = make(model, programs(3)[2])
    engine.step(data[0], target=data[1])
    before = models.gradients(model)
    with torch.no_grad():
        losses = [models.loss_fn(model(x), y) for x, y in zip(data[0].chunk(3), data[1].chunk(3), strict=True)]
    assert torch.equal(torch.stack(engine.evaluate(data[0], target=data[1]).losses), torch.stack(losses))
    assert not models.equal(models.gradients(model), before)


@pytest.mark.parametrize("recompute", ["none", "experts", "block"])
def test_only_steps_with_gradients_count_into_a_routers_load(recompute: Any) -> None:
    config = RouterConfig(4, 2, aux_coefficient=0.1)
    model = nn.Sequential(nn.Embedding(5, 8), MoE(8, 8, config), nn.Linear(8, 5))
    engine = make(model, programs(2)[2], recompute=recompute, loss_fn=lambda x, y: nn.functional.cross_entropy(x.mT, y))
    tokens = torch.randint(5, (4, 6))
    for step in range(3):
        engine.step(tokens, target=tokens)
        engine.evaluate(tokens, target=tokens)
        assert int(model[1].router.load.sum()) == (step + 1) * tokens.numel() * config.top_k


@pytest.mark.parametrize("scale", [8.0, 3.0])
def test_a_loss_scale_multiplies_auxiliary_losses_too(scale: float) -> None:
    def of_gate(**options: Any) -> Tensor:
        torch.manual_seed(3)
        config = RouterConfig(4, 2, aux_coefficient=10.0)
        model = nn.Sequential(nn.Embedding(5, 8), MoE(8, 8, config), nn.Linear(8, 5))
        tokens = torch.randint(5, (4, 6))
        make(model, programs(2)[2], loss_fn=lambda x, y: 0.0 * x.sum()).step(tokens, target=tokens, **options)
        return model[1].router.gate.weight.grad

    plain, scaled = of_gate(), of_gate(loss_scale=scale)
    apart = (scaled - scale * plain).abs().max() / (scale * plain.abs().max())
    assert apart <= (1e-6 if scale == 3.0 else 0.0)  # by a power of two every number is exact


def test_numbers_of_microbatches_are_followed_or_refused() -> None:
    data, model = models.batch(4), models.build()
    engine = make(model, programs(4)[2], costs=COSTS)
    with pytest.raises(ValueError, match="microbatches=0; allowed: "):
        engine.evaluate(data[0], target=data[1], microbatches=0)
    asked = list[int]()

    def arguments_of(stage: int, microbatch: int) -> dict[str, Any]:
        asked.append(microbatch)
        x, y = (part.chunk(2)[microbatch] for part in data)
        return {"inputs": x, "target": y, "loss_fn": models.loss_fn, "loss_grad": 0.5}

    engine.play(lambda: Feed(arguments_of, {0: 0.5, 1: 0.5}, None), microbatches=2)
    assert sorted(set(asked)) == [0, 1]
    assert engine.microbatches == 2


def test_a_step_in_inference_mode_is_refused() -> None:
    data, model = models.batch(2), models.build()
    engine = make(model, programs(2)[2])
    wanted = r"^a step with gradients under torch\.inference_mode\(\); allowed: outside of it, or evaluate\(\)\n"
    with torch.inference_mode():
        engine.evaluate(data[0], target=data[1])
        with pytest.raises(ValueError, match=wanted):
            engine.step(data[0], target=data[1])
    _, expected = models.plain_gradients(models.build(), *data, 2)
    engine.step(data[0], target=data[1])
    assert not models.equal(models.gradients(model), expected)


def test_two_engines_over_one_model_leave_it_as_it_was() -> None:
    data, model = models.batch(2), models.build()
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    for program in programs(2)[1:3]:
        step(model, program, 2, data)
    after = {name: dict(module.__dict__) for name, module in model.named_modules()}
    assert {n: sorted(d) for n, d in before.items()} == {n: sorted(d) for n, d in after.items()}


# ------------------------------------------------------------------------------------------------------- several ranks


class Delayed:
    """The real exchange with random pauses before everything that it starts."""

    def __init__(self, real: Exchange, seed: int) -> None:
        self.real, self.random = real, random.Random(seed)
        self.ranks, self.rank, self.background = self.real.ranks, self.real.rank, self.real.background
        self.sms, self.abort = real.sms, real.abort

    def _pause(self) -> None:
        if self.random.random() < 0.2:
            time.sleep(self.random.random() * 0.003)

    def rows(self, *args: Any) -> Transfer:
        self._pause()
        return self.real.rows(*args)

    def counts(self, *args: Any) -> Transfer:
        self._pause()
        return self.real.counts(*args)

    def expect_rows(self, *args: Any) -> Transfer[Tensor] | None:
        self._pause()
        return self.real.expect_rows(*args)

    def expect_counts(self, *args: Any) -> Transfer[Tensor] | None:
        return self.real.expect_counts(*args)


def _mesh(size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), *wide((2, 1), (2, 5), (4, 4))])
@over(lambda ranks, _: ranks, timeout=120)
def test_ranks_equal_sequential_and_one_process(rank: int, size: int, ranks: int, microbatches: int) -> None:
    """Programs and overlaps on all ranks, against plain autograd on the whole model in this process.

    Of five microbatches every program with every overlap.
    """
    mesh, problems = _mesh(size), []
    data = [models.batch(microbatches, seed=r, sequence=7) for r in range(size)]
    expected = models.of_one_process(models.build(), data, microbatches)
    group = mesh.get_group("ep")
    exchange = Delayed(build_exchange(group), seed=rank)
    reference: dict[str, Tensor] = {}
    for number, program in enumerate(programs(microbatches)):
        model = models.build(group)
        engine = make(model, program, mesh=mesh, exchange=exchange, costs=COSTS, verify=False, timeout=20)
        for overlap in overlaps_of(number, microbatches == 5):
            engine.plan = compile(program, engine.shapes, COSTS, overlap)
            model.zero_grad()
            result = engine.step(data[rank][0], target=data[rank][1])
            found = models.gradients(model)
            reference = reference or found
            where = f"{program.name} {overlap}"
            problems += [f"{where}: {name} differs from sequential" for name in models.equal(found, reference)]
            if result.peak_activations > program.peak_activations[0]:
                problems.append(f"{where}: {result.peak_activations} alive")
    problems += models.apart(reference, expected, rank, size, 1e-5)
    assert not problems, problems


@over(2)
def test_accumulated_steps_are_reduced_once(rank: int, size: int) -> None:
    """Gradients of an earlier step are not summed over the ranks a second time."""
    mesh, data = _mesh(size), models.batch(2, seed=rank)
    model = models.build(mesh.get_group("ep"))
    engine = make(model, programs(2)[1], mesh=mesh, costs=COSTS, timeout=20)
    engine.step(data[0], target=data[1])
    once = models.gradients(model)
    engine.step(data[0], target=data[1])
    both = models.gradients(model)
    problems = [name for name, g in both.items() if not torch.allclose(g, 2 * once[name], rtol=1e-5, atol=1e-7)]
    assert not problems, problems


@over(2)
def test_costs_set_on_one_rank_alone_end_both_ranks(rank: int, size: int) -> None:
    """In the first step before anything is exchanged; later as well."""
    mesh, data = _mesh(size), models.batch(2, seed=rank)
    for before in (0, 2):
        engine = make(models.build(mesh.get_group("ep")), programs(2)[1], mesh=mesh, timeout=3)
        for _ in range(before):
            engine.step(data[0], target=data[1])
        if rank == 0:
            engine.costs = COSTS
        said = "" if before else r"plan is \w+ on rank ep 0 and \w+ on rank ep 1; allowed: the same on all ranks"
        with pytest.raises((ValueError, LostRankError), match=said):
            engine.step(data[0], target=data[1])


@over(2)
def test_collective_exchange_gives_the_same_gradients(rank: int, size: int) -> None:
    """torch's all_to_all_single, which NCCL uses, through the same engine."""
    mesh, data = _mesh(size), models.batch(3, seed=rank)
    group = mesh.get_group("ep")
    found = []
    for exchange in (None, CollectiveExchange(group, group)):
        model = models.build(group)
        step(model, programs(3)[2], 3, data, mesh=mesh, exchange=exchange, timeout=20)
        found.append(models.gradients(model))
    problems = models.equal(*found)
    assert not problems, problems


# ------------------------------------------------------------------------------------------------------------ bad input


class Step(nn.Module):
    """A module whose forward is a step, as Lightning calls ``training_step``."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.model = models.build(mesh.get_group("ep"))
        self.__dict__["engine"] = make(self.model, programs(2)[0], mesh=mesh)

    def forward(self, inputs: Tensor, target: Tensor) -> None:
        self.engine.step(inputs, target=target)


@over(2)
def test_a_step_that_torch_would_sum_again_is_refused(rank: int, size: int) -> None:
    mesh = _mesh(size)
    message = "^a step with gradients in the forward of a DistributedDataParallel, which sums them again"
    with pytest.raises((ValueError, LostRankError)) as raised:
        nn.parallel.DistributedDataParallel(Step(mesh))(*models.batch(2))
    assert re.match(message, str(raised.value)) or isinstance(raised.value, LostRankError)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"program": "1f1b"}, "program='1f1b'; allowed: Program"),
        ({"model": ["x"]}, "'x' as a model or a block of it; allowed: an nn.Sequential or a list of blocks"),
        ({"model": 3}, "3 as a model or a block of it; allowed: an nn.Sequential or a list of blocks"),
        ({"block_weights": 3}, "block_weights=3; allowed: a list of numbers or None"),
        ({"capacity": "2"}, "capacity='2'; allowed: a finite number, more than 0"),
        ({"capacity": 0.0}, "capacity=0.0; allowed: a finite number, more than 0"),
        ({"capacity": True}, "capacity=True; allowed: a finite number, more than 0"),
        ({"experts_over": [["ep"]]}, "experts_over=[['ep']]; allowed: a list of ep, cp, or tp"),
        ({"block_weights": "121"}, "block_weights='121'; allowed: a list of numbers or None"),
        ({"experts_over": "ep"}, "experts_over='ep'; allowed: a list of ep, cp, or tp"),
        ({"experts_over": ("dp",)}, "experts_over=('dp',); allowed: a list of ep, cp, or tp"),
        ({"reduce": 1}, "reduce=1; allowed: True or False"),
        ({"mesh": "cpu"}, "mesh='cpu'; allowed: DeviceMesh or None"),
        ({"loss_fn": nn.MSELoss}, "loss_fn=MSELoss, a class; allowed: a function, or an object such as MSELoss()"),
        ({"device": 24}, "device=24; allowed: DeviceOptions"),
        ({"costs": 3}, "costs=3; allowed: NodeCosts or None"),
        ({"plan": "fast"}, "plan='fast'; allowed: Plan or None"),
        ({"loss_fn": "mse"}, "loss_fn='mse'; allowed: a function or None"),
        ({"count_tokens": 3}, "count_tokens=3; allowed: a function or None"),
        ({"timeout": float("inf")}, "timeout=inf; allowed: seconds > 0, at most 1e+09"),
        ({"tries": -1}, "tries=-1; allowed: 0 or more"),
        ({"tries": 1.5}, "tries=1.5; allowed: a whole number, 0 or more"),
        ({"verify": "no"}, "verify='no'; allowed: True or False"),
        ({"timeout": None}, "timeout=None; allowed: seconds > 0, at most 1e+09"),
    ],
)
def test_values_of_another_kind(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}") as caught:
        make(**{"model": models.build(), "program": programs(2)[0], **options})
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("x", "a result of count_tokens='x'; allowed: a finite number, 0 or more"),
        (None, "a result of count_tokens=None; allowed: a finite number, 0 or more"),
        (2.5, "a result of count_tokens=2.5; allowed: a whole number"),
        (torch.tensor(2.5), "a result of count_tokens=2.5; allowed: a whole number"),
        (math.nan, "a result of count_tokens=nan; allowed: a finite number, 0 or more"),
        (torch.ones(2), "count_tokens returns a tensor [2]; allowed: one number"),
    ],
)
def test_counts_of_tokens_of_another_kind(result: Any, message: str) -> None:
    engine = make(models.build(), programs(2)[0], count_tokens=lambda target: result)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        engine.step(*models.batch(2))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"observers": 3}, "observers=3; allowed: a list of Observer"),
        ({"observers": ["x"]}, "observers[0]='x'; allowed: Observer"),
        ({"grad": "no"}, "grad='no'; allowed: True or False"),
        ({"make_feed": None}, "make_feed=None; allowed: a function"),
    ],
)
def test_values_of_another_kind_that_a_step_gets(given: dict[str, Any], message: str) -> None:
    engine = make(models.build(), programs(2)[0])
    with pytest.raises(ValueError, match=f"(?m)^{re.escape(message)}$"):
        engine.play(**{"make_feed": list} | given)
    engine = make(models.build(), programs(2)[0])
    engine.observers.append(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"(?m)^observers\[[0-9]\]=3; allowed: Observer$"):
        engine.play(list)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("overlap", 2, "engine.overlap=2, which changes nothing; allowed: costs, loss_fn, microbatches, plan"),
        ("options", 3, "engine.options=3, which changes nothing; allowed: costs, loss_fn, microbatches, plan"),
        ("program", 3, "engine.program=3, which changes nothing; allowed: costs, loss_fn, microbatches, plan"),
        ("microbatches", 2.0, "microbatches=2.0; allowed: a whole number, 1 or more"),
        ("microbatches", torch.tensor(2.5), "microbatches=tensor(2.5000); allowed: a whole number, 1 or more"),
        ("microbatches", [2], "microbatches=[2]; allowed: a whole number, 1 or more"),
        ("loss_fn", nn.MSELoss, "loss_fn=MSELoss, a class; allowed: a function, or an object such as MSELoss()"),
        ("loss_fn", 3, "loss_fn=3; allowed: a function or None"),
        ("plan", None, "plan=None; allowed: Plan"),
        ("costs", 3, "costs=3; allowed: NodeCosts or None"),
    ],
)
def test_attributes_that_cannot_be_set(name: str, value: Any, message: str) -> None:
    engine = make(models.build(), programs(2)[0])
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        setattr(engine, name, value)
    engine.loss_fn = models.loss_fn


def test_attributes_of_a_users_own() -> None:
    class Named(Engine):
        count = 0

        def __init__(self, *args: Any, **given: Any) -> None:
            super().__init__(*args, **given)
            self.label = "mine"

    engine = Named(models.build(), build_schedule("1f1b", microbatches=2), loss_fn=models.loss_fn)
    engine.count += 1
    engine.tag = engine.label  # type: ignore[attr-defined]
    engine.observers += []
    plain = make(models.build(), build_schedule("1f1b", microbatches=2))
    plain.tag = 1
    with pytest.raises(ValueError, match=r"^engine.microbatch=3, which changes nothing; .*nearest: microbatches$"):
        plain.microbatch = 3


@pytest.mark.parametrize(
    ("call", "given", "message"),
    [
        ("step", {"return_outputs": "no"}, "return_outputs='no'; allowed: True or False"),
        ("evaluate", {"return_outputs": 1}, "return_outputs=1; allowed: True or False"),
        ("step", {"microbatches": 2.0}, "microbatches=2.0; allowed: a whole number, 1 or more"),
        ("evaluate", {"microbatches": True}, "microbatches=True; allowed: a whole number, 1 or more"),
        ("evaluate", {"inputs": torch.ones(0, 7)}, "inputs: a batch of 0 cannot be split into 2 microbatches; al"),
        ("step", {"inputs": 99 + torch.ones(4, 7).long()}, "block 0 (Embedding) is given torch.int64 [2, 7]: index"),
        ("step", {"inputs": torch.ones(4, 7)}, "block 0 (Embedding) is given torch.float32 [2, 7]: Expected tensor"),
        ("step", {"target": 99 + torch.ones(4, 7).long()}, "loss_fn is given torch.float32 [2, 7, 31], torch.int64"),
    ],
)
def test_batches_of_another_kind(call: str, given: dict[str, Any], message: str) -> None:
    engine = make(models.build(), programs(2)[0])
    inputs, target = models.batch(2)
    with pytest.raises((ValueError, IndexError, RuntimeError), match=f"(?m)^{re.escape(message)}"):
        getattr(engine, call)(**{"inputs": inputs, "target": target} | given)


def test_bad_input_is_named() -> None:
    model, data = models.build(), models.batch(2)
    program = programs(2)[0]
    with pytest.raises(ValueError, match="batch of 4 cannot be split into 3 microbatches"):
        step(model, programs(3)[0], 1, data)
    with pytest.raises(ValueError, match="overlap='all'; allowed"):
        step(model, program, "all", data)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"loss_fn returns shape \(4,\)"):
        Engine(model, programs(1)[0], loss_fn=lambda o, t: o.flatten()[:4]).step(data[0], target=data[1])
    with pytest.raises(ValueError, match="program '1f1b' over 2 pipeline ranks on a mesh with 1 along 'pp'"):
        make(models.build(), build_schedule("1f1b", ranks=2, microbatches=4))
    two = nn.Bilinear(8, 8, 8)  # its forward takes two tensors
    with pytest.raises(
        ValueError, match=r"^block 5 \(Bilinear\) is given 1 tensor.* argument: 'input2'; allowed: a for"
    ):
        step(nn.Sequential(*models.build(), two), program, 1, data)
    with pytest.raises(ValueError, match=r"^loss_fn is given 2 tensor.*: too many positional arguments; allowed: one"):
        Engine(model, programs(1)[0], loss_fn=lambda out: out.sum()).step(data[0], target=data[1])
    with pytest.raises(ValueError, match=r"^loss_fn returns a value of NoneType; allowed: one number"):
        Engine(model, programs(1)[0], loss_fn=lambda out, target: None).step(data[0], target=data[1])  # type: ignore
    with pytest.raises(ValueError, match="a model without blocks"):
        make([], program)
    with pytest.raises(TypeError, match=r"^Engine has no los_fn; allowed: model, .*; nearest: loss_fn$"):
        Engine(model, program, los_fn=models.loss_fn)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^EngineOptions has no overlp; allowed: .*; nearest: overlap$"):
        EngineOptions(overlp=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^EngineOptions\(…, 3\) without a name; allowed: overlap=, recompute=, .*"):
        EngineOptions(3)  # type: ignore[misc]
    engine = make(model, program)
    with pytest.raises(TypeError, match=r"^Engine\.step\(…, 1\.0\) without a name; allowed: loss_scale=, return_out"):
        engine.step(data[0], data[1], 1.0)  # type: ignore[misc]
    with pytest.raises(ValueError, match=r"^loss_scale='x'; allowed: a finite number$"):
        engine.step(data[0], data[1], loss_scale="x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^result=tensor.*; allowed: StepResult$"):
        engine.mean_loss(engine.step(data[0], data[1]).loss)  # type: ignore[arg-type]
    message = r"^weight of block 0 \(Embedding\) is on the meta device in a step; allowed: parameters with values"
    with pytest.raises(ValueError, match=message):
        step(models.build().to("meta"), program, 1, data)
    late = models.build().to("meta")
    engine = make(late, program)
    late.to_empty(device="cpu")
    message = r"^weight of block 0 \(Embedding\) is on 'cpu', in an Engine for a model on 'meta'; allowed"
    with pytest.raises(ValueError, match=message):
        engine.step(data[0], target=data[1])


class Nests(models.Block):
    """Uses an engine behind its experts."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.use: Callable[[], object] = int

    def around(self, experts: nn.Module, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        rows = super().around(experts, tokens, indices, weights)
        self.use()
        return rows


@pytest.mark.parametrize("where", ["block", "loss"])
def test_a_step_inside_a_step_is_refused(where: str) -> None:
    other, model, data = engine_of_four(models.build()), models.build(block=Nests), models.batch(4)

    def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
        if where == "loss":
            outer.evaluate(data[0], target=data[1])
        return models.loss_fn(logits, target)

    for block in model.modules():
        if where == "block" and isinstance(block, Nests):
            block.use = lambda: other.step(data[0], target=data[1])
    outer = make(model, build_schedule("combined_1f1b", microbatches=4), loss_fn=loss_fn, costs=COSTS)
    with pytest.raises(RuntimeError, match="an engine is used inside a block or a loss of a step; allowed: between"):
        outer.step(data[0], target=data[1])
    assert other.evaluate(data[0], target=data[1]).loss > 0


def test_engines_in_two_threads() -> None:
    """The thread that ends its step first takes nothing away from the other, and the compiler's stance is as before."""
    eval_frame: Any = importlib.import_module("torch._dynamo.eval_frame")
    stance = eval_frame._stance
    inputs, target = models.batch(4)
    _, expected = models.plain_gradients(models.build(), inputs, target, 4)
    found: list[list[str]] = []

    def train(model: nn.Sequential) -> None:
        engine = engine_of_four(model)
        for _ in range(5):
            model.zero_grad()
            engine.step(inputs, target=target)
            found.append(models.equal(models.gradients(model), expected))

    threads = [threading.Thread(target=train, args=(models.build(),)) for _ in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert found == [[]] * 10
    assert eval_frame._stance == stance


def engine_of_four(model: nn.Sequential) -> Engine:
    return make(model, build_schedule("combined_1f1b", microbatches=4), costs=COSTS)
