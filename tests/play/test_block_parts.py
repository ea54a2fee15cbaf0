"""Parts of a call of experts: gradients of one part to rounding, and bit-equal whatever the order of nodes."""

from contextlib import nullcontext
from itertools import cycle
from typing import Any, get_args

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b.engine import Stage
from overlap1f1b.plan import NodeCosts, Op, Overlap, Recompute
from overlap1f1b.schedule import Kind, Program, build_schedule
from tests import models
from tests.engines import make
from tests.pauses import pauses
from tests.ranks import over
from tests.tiers import wide

COSTS = NodeCosts.uniform(attention=3, experts=2, dispatch=3, counts=0.4, aggregate=0.2, dense=1, reduce=2, send=1)
OVERLAPS: tuple[Overlap, ...] = ("pairs", 1, 2, 3)
UNEVEN, FEWER_TOKENS_THAN_PARTS = {"rows": 2, "sequence": 7}, {"rows": 1, "sequence": 3}
TWICE_DROPPED = {"expert_calls": 2, "dropout": 0.3}

Found = tuple[list[float], dict[str, torch.Tensor], list[float]]


def found(
    parts: int, program: Program, overlap: Overlap, size: dict[str, int], options: dict[str, Any], **more: Any
) -> Found:
    """Losses and gradients of a step, and losses of an evaluation."""
    model = models.build(**options)
    data = models.batch(program.microbatches, **size)
    engine = make(
        model, program, loss_fn=models.loss_fn, overlap=overlap, parts=parts, costs=COSTS, verify=False, **more
    )
    torch.manual_seed(5)
    result = engine.step(data[0], target=data[1])
    model.eval()
    evaluated = engine.evaluate(data[0], target=data[1])
    return [float(x) for x in result.losses], models.gradients(model), [float(x) for x in evaluated.losses]


def differing(one: Found, other: Found) -> list[str]:
    return ["losses"] * (one[0] != other[0]) + ["evaluation"] * (one[2] != other[2]) + models.equal(one[1], other[1])


@pytest.mark.parametrize(
    ("options", "size"),
    [(TWICE_DROPPED, UNEVEN), ({"weights_in": "activation"}, UNEVEN), ({}, FEWER_TOKENS_THAN_PARTS)],
    ids=["two calls", "weights in the activation", "fewer tokens than parts"],
)
@models.default_dtype(torch.float64)
def test_the_same_as_one_part(options: dict[str, Any], size: dict[str, int]) -> None:
    """Routing is uneven, and experts are without tokens."""
    program = build_schedule("sequential", microbatches=2)
    expected = found(1, program, "serial", size, options)
    for parts in (2, 3, 5):
        losses, gradients, evaluated = found(parts, program, "serial", size, options)
        assert losses == pytest.approx(expected[0], rel=1e-12)
        assert evaluated == pytest.approx(expected[2], rel=1e-12)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[1][name], rtol=1e-12, atol=1e-12, msg=name)


ORDERED = [
    pytest.param(parts, recompute, marks=[pytest.mark.wide] * (recompute != "block"))
    for parts, recompute in zip(cycle((2, 3)), get_args(Recompute), strict=False)
]


@pytest.mark.parametrize(("parts", "recompute"), ORDERED)
def test_every_order_gives_the_same_bits(parts: int, recompute: Recompute) -> None:
    cases: list[tuple[int, dict[str, Any], list[tuple[str, Overlap]]]] = [
        (1, {}, [("combined_1f1b", "pairs"), ("combined_1f1b", 3)]),
        (4, {}, [("combined_1f1b", "pairs"), ("combined_1f1b", 2), ("combined_1f1b", 3)]),
        (2, TWICE_DROPPED, [("combined_1f1b", 1), ("combined_1f1b", 3), ("zb_h1", 3)]),
    ]
    for microbatches, options, orders in cases:
        serial = build_schedule("sequential", microbatches=microbatches)
        expected = found(parts, serial, "serial", UNEVEN, options)
        for name, overlap in orders:
            program = build_schedule(name, microbatches=microbatches)
            other = found(parts, program, overlap, UNEVEN, options, recompute=recompute)
            assert not differing(expected, other), (name, overlap)


def test_room_for_rows() -> None:
    program = build_schedule("combined_1f1b", microbatches=3)
    expected = found(2, program, "serial", UNEVEN, {})
    for overlap in OVERLAPS:
        assert not differing(expected, found(2, program, overlap, UNEVEN, {}, capacity=8.0))


def test_one_microbatch_hides_its_exchanges_behind_its_own_experts() -> None:
    engine = make(models.build(), build_schedule("sequential", microbatches=1), costs=COSTS, parts=2)
    order = [(node.op, node.part) for node in engine.plan.nodes if node.kind is Kind.F and node.block == 1]
    assert order.index((Op.DISPATCH, 1)) < order.index((Op.EXPERTS, 0)) < order.index((Op.COMBINE, 0))
    assert order.index((Op.COMBINE, 0)) < order.index((Op.EXPERTS, 1))
    measured = make(models.build(), build_schedule("sequential", microbatches=2), parts=2)
    data = models.batch(2)
    for _ in range(3):
        measured.step(data[0], target=data[1])
    assert {key[5] for key in measured.costs.by_node if key[0] is Op.EXPERTS and key[1] is Kind.F} == {0, 1}
    assert {key[5] for key in measured.costs.by_node if key[0] is Op.EXPERTS and key[1] is Kind.W} == {0}


@pytest.mark.parametrize(("parts", "recompute"), [(2, "none"), *wide((3, "block"), (5, "experts"))])
@over(2)
def test_two_ranks(rank: int, size: int, parts: int, recompute: Recompute) -> None:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    data, problems = models.batch(3, seed=rank), []
    expected: dict[str, torch.Tensor] = {}
    for name, overlap in (("sequential", "serial"), ("combined_1f1b", "pairs"), ("combined_1f1b", 3), ("zb_h1", 2)):
        model = models.build(mesh.get_group("ep"), expert_calls=1, dropout=0.2)
        program = build_schedule(name, microbatches=3)
        options: dict[str, Any] = {
            "costs": COSTS,
            "parts": parts,
            "recompute": recompute,
            "timeout": 30,
            "verify": False,
        }
        engine = make(model, program, mesh=mesh, overlap=overlap, **options)
        torch.manual_seed(1)
        with pauses(17 * rank + 1):
            engine.step(data[0], target=data[1])
        gradients = models.gradients(model)
        expected = expected or gradients
        problems += [f"{name}, {overlap}: {line}" for line in models.equal(gradients, expected)]
    assert not problems, problems


@over(2)
@models.default_dtype(torch.float64)
def test_the_number_of_parts_is_chosen_by_costs_that_are_measured_for_it(rank: int, size: int) -> None:
    """Steps in which three numbers of parts are measured, and one by the number that is chosen."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    data, model, problems = models.batch(3, seed=rank), models.build(mesh.get_group("ep"), layers=1), list[str]()
    program, expected = build_schedule("combined_1f1b", microbatches=3), dict[str, torch.Tensor]()
    engine = make(model, program, mesh=mesh, parts="auto", tries=0, timeout=30)
    for parts in (1, 1, 2, 2, 4, 4, None):
        if parts != (None if engine.costs else engine.tuner.parts):
            problems.append(f"{engine.tuner.parts} instead of {parts} parts")
        model.zero_grad()
        with nullcontext() if parts else pauses(rank):
            engine.step(data[0], target=data[1])
        gradients = models.gradients(model)
        expected = expected or gradients
        for name, gradient in gradients.items():
            if not torch.allclose(gradient, expected[name], rtol=1e-12, atol=1e-12):
                problems.append(f"{parts} parts: {name} differs")
    predicted = engine.tuner.predicted
    if list(predicted) != [1, 2, 4] or engine.plan.predicted > min(predicted.values()) / 0.98:
        problems.append(f"{engine.tuner.parts_choice} was chosen")
    if {block.parts for stage in engine.plan.shapes for block in stage if block.expert_calls} != {engine.tuner.parts}:
        problems.append("the plan has other parts")
    assert not problems, problems


def test_costs_of_one_number_choose_none() -> None:
    program = build_schedule("sequential", microbatches=2)
    with pytest.raises(ValueError, match="parts='auto' with costs or a plan, which have one already; allowed: that"):
        make(models.build(), program, costs=COSTS, parts="auto")


@pytest.mark.parametrize("parts", [0, 9, 1.5, True])
def test_numbers_of_parts_that_are_refused(parts: Any) -> None:
    with pytest.raises(ValueError, match=f"parts={parts!r}; allowed: 1 to 8"):
        Stage(models.build(), parts=parts)
