"""Exchanges of equal sizes give what exact ones give, and no row is lost in silence."""

import re
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b.engine import CapacityOverflowError, Engine, LostRankError
from overlap1f1b.moe import GroupedExperts
from overlap1f1b.plan import Overlap
from overlap1f1b.schedule import build_schedule
from overlap1f1b.transport.exchange import Exchange, LocalExchange, Transfer
from overlap1f1b.transport.loopback import LoopbackExchange
from tests import models
from tests.engines import COSTS, make
from tests.ranks import over
from tests.tiers import wide

PROGRAM = build_schedule("combined_1f1b", microbatches=4, extra_warmup=1)


def _engine(capacity: float | None, exchange: Exchange | None = None) -> Engine:
    return make(models.build(dropout=0.1), PROGRAM, exchange=exchange, costs=COSTS, capacity=capacity)


def _step(engine: Engine, steps: int = 2) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Losses and gradients of steps that add up."""
    torch.manual_seed(1)
    losses = [loss for _ in range(steps) for loss in engine.step(*models.batch(4)).losses]
    return losses, models.gradients(torch.nn.Sequential(*engine.stages[0].blocks))


@pytest.mark.parametrize("loopback", [False, True])
def test_with_room_for_all_nothing_changes(loopback: bool) -> None:
    exchange = LoopbackExchange(torch.device("cpu")) if loopback else None
    losses, gradients = _step(_engine(1.0, exchange=exchange), steps=1)
    wanted_losses, wanted = _step(_engine(None), steps=1)
    assert torch.equal(torch.stack(losses), torch.stack(wanted_losses))
    assert not models.equal(gradients, wanted)


class Noting(LocalExchange):
    """Notes when rows leave and when counts are awaited."""

    def __init__(self) -> None:
        self.noted: list[str] = []

    def rows(self, source: torch.Tensor, *_: Any) -> Transfer[torch.Tensor]:
        self.noted.append("rows leave")
        return super().rows(source)

    def counts(self, counts: torch.Tensor, *_: Any) -> Transfer[torch.Tensor]:
        return Awaited(super().counts(counts).result, noted=self.noted)


@dataclass
class Awaited(Transfer[torch.Tensor]):
    """Counts that note when something waits for them."""

    at_once = False
    noted: list[str] = field(default_factory=list)

    def receive(self, timeout: timedelta | None = None) -> torch.Tensor:
        self.noted.append("counts are awaited")
        return super().receive(timeout)


@pytest.mark.parametrize("capacity", [None, 1.0])
def test_rows_leave_before_their_counts_have_come(capacity: float | None) -> None:
    exchange = Noting()
    _step(_engine(capacity, exchange=exchange), steps=1)
    assert exchange.noted[0] == ("counts are awaited" if capacity is None else "rows leave")
    assert 4 * exchange.noted.count("counts are awaited") == exchange.noted.count("rows leave")


def test_an_overflow_raises_and_leaves_gradients_as_they_were() -> None:
    engine = _engine(0.75)
    data = models.batch(4)
    parameters = list(engine.parameters())
    before = [torch.randn_like(p) for p in parameters]
    for parameter, grad in zip(parameters, before, strict=True):
        parameter.grad = grad.clone()
    with pytest.raises(CapacityOverflowError) as caught:
        engine.step(data[0], target=data[1])
    assert all(torch.equal(p.grad, g) for p, g in zip(parameters, before, strict=True) if p.grad is not None)
    # 14 tokens of a microbatch, 2 experts each: 28 rows for the one rank, and room for 21.
    pattern = (
        r"(\d+) choices of block \d+ \(Block\), microbatch \d, found no room under capacity=0\.75: "
        r"11 rows and 21 choices to each rank; most of expert (\d+), (\d+) of (\d+)"
    )
    found = re.search(pattern, str(caught.value))
    assert found is not None, str(caught.value)
    lost, _, most, of = map(int, found.groups())
    assert lost == 7
    assert 0 < most <= min(lost, of)
    with pytest.raises(CapacityOverflowError):
        engine.evaluate(data[0], target=data[1])


class Halves(GroupedExperts):
    """Experts that read their counts as a list."""

    def compute(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:  # type: ignore[override]
        assert isinstance(counts, list)
        assert sum(counts) == len(rows)
        return torch.cat([part * (1 + index) for index, part in enumerate(rows.split(counts))]) / 2


@over(2, timeout=120)
def test_two_ranks(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    problems = []
    cases: list[tuple[float | None, Overlap, bool]] = [
        (None, 3, False),
        (2.0, 3, False),  # room for every row
        (None, "pairs", True),
        (2.0, "pairs", True),
    ]
    data, wanted = models.batch(4, seed=rank), dict[str, torch.Tensor]()
    for capacity, overlap, foreign in cases:
        model = models.build(mesh.get_group("ep"), dropout=0.1)
        for module in model.modules():
            if foreign and isinstance(module, GroupedExperts):
                module.__class__ = Halves
        options = {"overlap": overlap, "costs": COSTS, "verify": foreign, "timeout": 30}
        torch.manual_seed(rank)
        make(model, PROGRAM, mesh=mesh, capacity=capacity, **options).step(data[0], target=data[1])
        wanted = models.gradients(model) if capacity is None else wanted
        problems += [f"{capacity} {overlap} {name}" for name in models.equal(models.gradients(model), wanted)]
    engine = make(models.build(mesh.get_group("ep")), PROGRAM, mesh=mesh, costs=COSTS, timeout=30, capacity=1.0)
    with pytest.raises(CapacityOverflowError, match="11 rows and 14 choices to each rank"):
        engine.step(data[0], target=data[1])
    assert not problems, problems


@pytest.mark.parametrize("ranks", [2, *wide(4)])
@pytest.mark.parametrize(("at", "evaluates"), [(0, False), *wide((3, False), (1, True))])
@over(lambda ranks, *_: ranks)
def test_other_numbers_of_tokens_in_a_later_step(rank: int, size: int, ranks: int, at: int, evaluates: bool) -> None:
    """One microbatch has fewer tokens on the last rank, behind a step that had not: gloo would end the process."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    model = models.build(mesh.get_group("ep"))
    engine = make(model, PROGRAM, mesh=mesh, costs=COSTS, timeout=30, capacity=float(size))
    inputs, target = ([*part.chunk(4)] for part in models.batch(4, seed=rank))
    engine.step(inputs, target=target)
    if rank == size - 1:
        inputs[at], target[at] = inputs[at][:, 2:], target[at][:, 2:]
    with pytest.raises((ValueError, LostRankError), match="tokens") as caught:  # the second if told by another rank
        (engine.evaluate if evaluates else engine.step)(inputs, target=target)
    said, tokens = str(caught.value), [14] * (size - 1) + [10]
    assert f"capacity={size} with {tokens} tokens on the ranks that share the experts; allowed: " in said, said


def test_gradients_of_a_parameter_in_two_places_add_up_once() -> None:
    """An embedding whose weight the head shares, over two steps under a capacity."""
    data, found = models.batch(4), []
    for capacity in (None, 1.0):
        model = models.build(tied=True)
        engine = make(model, PROGRAM, costs=COSTS, capacity=capacity)
        for _ in range(2):
            engine.step(data[0], target=data[1])
        found.append(models.gradients(model))
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, msg=name)
