"""The bound against what is compiled."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap1f1b.plan import NodeCosts, Overlap, StageShape, bound, compile
from overlap1f1b.schedule import SCHEDULES, Program, build_schedule, schedule_of
from tests.plan.cases import DENSE, MOE, costs_of, programs, shapes, table_costs
from tests.programs import combined_1f1b, sequential

OVERLAPS: tuple[Overlap, ...] = ("serial", "pairs", 1, 2, 3)


@st.composite
def pipelines(draw: st.DrawFn) -> Program:
    """Any schedule over a few ranks, of those that know them with chunks, extra warm-up or no backward."""
    name = draw(st.sampled_from(SCHEDULES))
    ranks = draw(st.sampled_from([1, 2, 3]) if name != "dualpipe" else st.just(2))
    microbatches = 2 * ranks + draw(st.sampled_from([0, 2]))
    options: dict[str, Any] = {"forward_only": draw(st.integers(0, 4)) == 0}
    if schedule_of(name).takes("chunks"):
        options["chunks"] = draw(st.integers(1, 2))
    if schedule_of(name).takes("extra_warmup"):
        options["extra_warmup"] = draw(st.integers(0, 2))
    return build_schedule(name, ranks=ranks, microbatches=microbatches, **options)


@given(st.data())
@settings(deadline=None, max_examples=15)
def test_no_plan_is_under_its_bound(data: st.DataObject) -> None:
    program = data.draw(st.one_of(programs(), pipelines()))
    shape, overlap = data.draw(shapes()), data.draw(st.sampled_from(OVERLAPS))
    costs, block = data.draw(costs_of(shape)), data.draw(st.booleans())
    least = bound(program, shape, costs, overlap)
    assert 0 <= least <= compile(program, shape, costs, overlap, counts_block=block).predicted * (1 + 1e-12)


@given(pipelines(), st.sampled_from([(MOE,), (DENSE, MOE)]), st.integers(0, 40), st.integers(0, 40), st.integers(0, 8))
@settings(deadline=None, max_examples=15)
def test_of_serial_schedules_it_is_the_makespan_but_for_weight_gradients(
    program: Program, shape: StageShape, dispatch: int, experts: int, send: int
) -> None:
    """Of forwards alone nothing is left out, so long as no two transfers meet on their way."""
    costs = NodeCosts.uniform(attention=3, experts=experts, dispatch=dispatch, dense=5, send=send)
    least, predicted = bound(program, shape, costs, "serial"), compile(program, shape, costs, "serial").predicted
    assert least <= predicted
    if program.forward_only and send == 0:
        assert least == predicted


@pytest.mark.parametrize("name", SCHEDULES)
def test_it_is_of_use(name: str) -> None:
    """Within a third of what is compiled, over several ranks and with as much exchange as compute."""
    program = build_schedule(name, ranks=4, microbatches=8)
    costs = NodeCosts.uniform(attention=3, experts=4, dispatch=21 / 4, send=1)
    for overlap in ("serial", 3):
        predicted = compile(program, (MOE,), costs, overlap).predicted  # type: ignore[arg-type]
        assert bound(program, (MOE,), costs, overlap) > 0.67 * predicted  # type: ignore[arg-type]


def test_known_bounds() -> None:
    """One rank: 4 microbatches of 21 compute and 21 exchange; overlapped, the lanes alone count."""
    costs, program = table_costs(1), combined_1f1b(4, 0)
    assert bound(program, (MOE,), costs, 3) >= 4 * 21
    assert bound(sequential(4), (MOE,), costs, "serial") >= 4 * (7 + 7 + 4 * 21 / 4) + 3
    assert bound(program, (MOE,), NodeCosts.uniform(attention=3, experts=4, dispatch=50), 9) >= 4 * 4 * 50
