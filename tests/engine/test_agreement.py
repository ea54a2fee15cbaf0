"""Ranks that differ in what has to be equal are told so, with both values, before anything wrong is trained."""

import itertools
import warnings
from contextlib import nullcontext
from dataclasses import fields
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b.engine import EngineOptions, Stage
from overlap1f1b.engine.agreement import described, entries_of, structure, values
from overlap1f1b.plan import NodeCosts, Op
from overlap1f1b.schedule import Kind, build_schedule
from overlap1f1b.transport.failures import LostRankError
from overlap1f1b.transport.mesh import Mesh
from tests import models
from tests.engines import make, said_of
from tests.ranks import over
from tests.tiers import first, wide

LIMIT = 20.0
OPTIONS: dict[str, Any] = {"recompute": "block", "count_tokens": lambda y: y.numel()}
_BY_NODE = [((Op.EXPERTS, Kind.F, 0, 0, 0, 0), 1.0), ((Op.EXPERTS, Kind.I, 0, 0, 0, 0), 2.0)]
OTHERS = ("program", "microbatches", "seed", "top_k", "frozen", "layers", "loss_scale")


def one_choice(tokens: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights, indices = logits.softmax(-1).topk(1, -1)
    return indices, weights


@pytest.mark.parametrize(
    ("what", "culprit"), first(zip([*OPTIONS, *OTHERS], itertools.cycle([0, 3]), strict=False), ("recompute", 0))
)
@over(4, timeout=3 * LIMIT)
def test_every_rank_says_which_rank_has_which_value(rank: int, size: int, what: str, culprit: int) -> None:
    """One of four has another option, program, model or call."""
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("pp", "ep"))
    own = what if rank == culprit else ""
    given = {own: OPTIONS[own]} if own in OPTIONS else {}
    schedule = "1f1b" if own == "program" else "combined_1f1b"
    program = build_schedule(schedule, ranks=2, microbatches=6 if own == "microbatches" else 4)
    choose = (one_choice if own == "top_k" else models.top_k,)
    model = models.build(mesh.get_group("ep"), layers=4 if own == "layers" else 2, choose=choose)
    for parameter in model.parameters() if own == "seed" else ():
        parameter.data += 1e-3
    model.requires_grad_(own != "frozen")
    inputs, target = models.batch(12, seed=rank)
    with pytest.raises((ValueError, LostRankError)) as caught:
        make(model, program, mesh=mesh, timeout=LIMIT, **given).step(
            inputs, target=target, loss_scale=2.0 if own == "loss_scale" else 1.0
        )
    said = said_of(caught.value)
    assert f"rank pp {culprit // 2}, ep {culprit % 2}" in said, said
    assert "; allowed: the same on all ranks" in said, said


@over(2)
def test_a_scale_that_differs_in_a_later_step_is_told(rank: int, size: int) -> None:
    """A gradient scaler of its own on one rank, from the fifth step on; nothing else is exchanged between steps."""
    mesh, program = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)), build_schedule("1f1b", microbatches=2)
    engine = make(models.build(mesh.get_group("ep")), program, mesh=mesh, costs=NodeCosts(), timeout=LIMIT)
    inputs, target = models.batch(2, seed=rank)
    for _ in range(4):
        engine.step(inputs, target=target)
    with pytest.raises((ValueError, LostRankError)) as caught:
        engine.step(inputs, target=target, loss_scale=1.0 + rank)
    assert "loss_scale is 1.0 on rank ep 0 and 2.0 on rank ep 1" in said_of(caught.value)


@pytest.mark.parametrize("ranks", [2, *wide(4)])
@over(lambda ranks: ranks, timeout=6 * LIMIT)
def test_other_rows_on_ranks_of_one_pipeline_are_told_once(rank: int, size: int, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("pp", "ep"))
    pp, ep = mesh.get_local_rank("pp"), mesh.get_local_rank("ep")
    program = build_schedule("combined_1f1b", ranks=2, microbatches=2)
    (inputs, target), (others, labels) = models.batch(2, seed=ep), models.batch(2, seed=rank + 2)
    alone = (None, target) if pp else (inputs, None)
    for (x, y), told_once in (
        ((inputs, target), []),
        (alone, []),
        ((others, labels), ["inputs and target:"]),
        ((others, target), ["different inputs:"]),
    ):
        model = models.build(mesh.get_group("ep"), layers=1)
        engine = make(model, program, mesh=mesh, costs=NodeCosts(), timeout=LIMIT)
        with warnings.catch_warnings(record=True) as told, engine:
            warnings.simplefilter("always")
            engine.step(x, target=y)
            engine.step(x, target=y)
        said = [str(one.message) for one in told if "of one pipeline" in str(one.message)]
        assert len(said) == len(told_once), said
        assert all(part in line for part, line in zip(told_once, said, strict=True)), said


@over(2)
def test_a_value_that_one_rank_refuses_ends_the_others_at_once(rank: int, size: int) -> None:
    """It is told to the other; the next engine works."""
    mesh, program = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)), build_schedule("1f1b", microbatches=2)
    model: Any = models.build(mesh.get_group("ep")) if rank else []
    with pytest.raises((ValueError, LostRankError)) as caught:
        make(model, program, mesh=mesh, timeout=LIMIT)
    assert "a model without blocks" in said_of(caught.value)
    inputs, target = models.batch(2, seed=rank)
    make(models.build(mesh.get_group("ep")), program, mesh=mesh, timeout=LIMIT).step(inputs, target=target)


@over(2)
def test_a_mistake_on_a_mesh_of_one_rank_ends_nothing(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("other", "ep"))["ep"]
    engine = make(models.build(), build_schedule("sequential", microbatches=2), mesh=mesh)
    inputs, target = models.batch(2)
    with pytest.raises(ValueError, match="cannot be split"):
        engine.step(inputs[:3], target=target)
    engine.step(inputs, target=target)


@over(2)
def test_an_error_is_itself_where_the_process_group_was_destroyed(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    calls = []

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls.append(output)
        if len(calls) == 3:
            raise ArithmeticError("the third loss")
        return models.loss_fn(output, target)

    program = build_schedule("sequential", microbatches=2)
    engine = make(models.build(mesh.get_group("ep")), program, mesh=mesh, loss_fn=loss_fn, timeout=LIMIT)
    inputs, target = models.batch(2, seed=rank)
    engine.step(inputs, target=target)
    dist.destroy_process_group()
    with pytest.raises(ArithmeticError, match="the third loss"):
        engine.step(inputs, target=target)


def test_no_option_is_left_out() -> None:
    assert EngineOptions().facts.keys() == {one.name for one in fields(EngineOptions)} - {"timeout"}


def test_equal_costs_in_another_order_are_equal() -> None:
    costs = [NodeCosts(by_node=dict(order)) for order in (_BY_NODE, _BY_NODE[::-1])]
    assert EngineOptions(costs=costs[0]).facts == EngineOptions(costs=costs[1]).facts


@over(2)
def test_long_values_are_told_from_where_they_differ(rank: int, size: int) -> None:
    mesh = Mesh(init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)), timedelta(seconds=20))
    message = r"name is …x{20}1x+… on rank ep 0 and …x{20}2x+… on rank ep 1; allowed: the same"
    with pytest.raises(ValueError, match=message):
        mesh.agree({"name": "x" * 500 + str(rank + 1) + "x" * 500})


class Numbered(nn.Module):
    """Layers of which a rank has some, by their names."""

    def __init__(self, names: list[str], marked: bool = False) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({name: nn.LayerNorm(models.H) for name in names})
        for parameter in self.experts.parameters() if marked else ():
            parameter.allreduce = False  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(expert(x) for expert in self.experts.values())


class Wrapped(nn.Module):
    """A layer inside another module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


NAMES = {
    "numbers": ([["0"], ["1"]], r"er 0 \(experts\.\*\.weight\) .*\.0\.weight on .*\.1\.weight .*, or allreduce = F"),
    "numbers in names": ([["expert_0"], ["expert_1"]], r"is experts\.expert_0\.weight .* experts\.expert_1\.weight on"),
    "counts": ([["0"], ["0", "1"]], r"the number of trained parameters of .* is 2 on rank ep 0 and 4 on rank ep 1"),
    "none on one rank": ([["0"], []], r"the number of trained parameters of .* is 2 on rank ep 0 and 0 on rank ep 1"),
    "order": ([["a", "b"], ["b", "a"]], r"the place of experts\.(a|b)\.weight .* is (0|2) on rank ep 0 and (2|0) on"),
    "a sign": ([["0"], ["1"]], ""),
    "frozen": ([["0"], ["1"]], ""),
    "a wrapper": ([["0", "1"], ["0", "1"]], ""),
}
"""Layers of each rank, and what is said of them."""


@pytest.mark.parametrize("case", first(NAMES, "numbers"))
@over(2)
def test_names_of_parameters(rank: int, size: int, case: str) -> None:
    """Gradients are summed by their places: of two experts in silence, if each rank has numbered its own."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    torch.manual_seed(0)
    experts = Numbered(NAMES[case][0][rank], case == "a sign")
    experts.requires_grad_(case != "frozen")
    if case == "a wrapper" and rank:
        experts.experts["0"] = Wrapped(experts.experts["0"])
    model, program = nn.Sequential(nn.Linear(models.H, models.H), experts), build_schedule("sequential", microbatches=2)
    engine = make(model, program, mesh=mesh, loss_fn=nn.functional.mse_loss)
    with pytest.raises(ValueError, match=NAMES[case][1]) if NAMES[case][1] else nullcontext():
        engine.step(torch.randn(4, models.H), target=torch.randn(4, models.H))


def test_facts_of_equal_models_are_equal_and_change_with_any_bit() -> None:
    first, second = (Stage(models.build(), number=1) for _ in range(2))
    alone = Mesh(None)
    assert structure({1: first}) == structure({1: second})
    facts = values({1: first}, {}, alone)
    assert facts == values({1: second}, {}, alone)
    weight = second.blocks[0].get_parameter("weight")
    with torch.no_grad():
        weight[3, 2] = torch.nextafter(weight[3, 2], torch.tensor(1.0))
    changed = values({1: second}, {}, alone)
    assert [name for name in facts if facts[name] != changed[name]] == [
        "the values of parameter weight of block 0 (Embedding) of stage 1"
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.uint8])
def test_values_of_any_dtype_have_a_sum(dtype: torch.dtype) -> None:
    block = nn.Linear(3, 3, bias=False)
    block.weight = nn.Parameter(torch.arange(9).view(3, 3).to(dtype), requires_grad=False)
    facts = values({0: Stage([block])}, {"name": block.weight}, Mesh(None))
    *_, own, tied = facts.values()
    assert own == tied != "0"


def test_options_of_another_order_of_actions_differ() -> None:
    one, other = (build_schedule("combined_1f1b", microbatches=4, extra_warmup=w) for w in (0, 1))
    assert described(one) != described(other)


def test_entries_of_large_gradients_are_compared() -> None:
    """In float32 the last index would be rounded up."""
    assert entries_of(torch.zeros(2**24 + 4)).shape == (64,)


def test_entries_are_taken_on_the_host_under_another_default_device() -> None:
    with torch.device("meta"):  # stands for a GPU
        found = entries_of(torch.arange(127, device="cpu"))
    assert found.tolist() == list(range(0, 127, 2))
