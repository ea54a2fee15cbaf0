"""A gate on the hidden fraction: said once, or raised on all ranks alike; the engine goes on."""

from __future__ import annotations

import math
import warnings
from typing import Any
from unittest.mock import patch

import pytest
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b.engine import NotHiddenError
from overlap1f1b.learn import pooling
from overlap1f1b.plan import NodeCosts
from overlap1f1b.schedule import build_schedule
from tests import models
from tests.engines import COSTS, make
from tests.ranks import Ranks
from tests.tiers import wide

SLOW = NodeCosts.uniform(attention=300, experts=400, dispatch=1)
"""By these all is hidden; in fact two ranks that wait for each other hide less."""


def gated(
    rank: int,
    size: int,
    gate: float | str,
    overlap: Any,
    costs: NodeCosts,
    numbers: tuple[int, ...] = (4,) * 8,
    share: float = math.inf,
) -> list[str]:
    """Return what is warned of, or raised, in steps; the first rank alone hides less than the others.

    They may spend a ``share`` of steps on pooling.
    """
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    program = build_schedule("combined_1f1b", microbatches=4)
    options = {"mesh": mesh, "costs": costs, "overlap": overlap, "gate": gate, "timeout": 60}
    found = []
    with (
        patch.object(pooling, "PART", share),
        make(models.build(mesh.get_group("ep")), program, **options) as engine,
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        for step, number in enumerate(numbers, 1):
            try:
                engine.step(*models.batch(number, seed=rank), microbatches=number)
            except NotHiddenError as error:
                found.append(f"{step}: {error}" if error.result else "no result")
    return found + [str(one.message) for one in said if "of the exchange is hidden" in str(one.message)]


@pytest.mark.parametrize("gate", [0.0, *wide("error:0")])
def test_a_gate_that_nothing_falls_below(ranks2: Ranks, gate: float | str) -> None:
    assert ranks2.run(gated, gate, 2, COSTS) == [[], []]


def test_a_warning_is_said_once(ranks2: Ranks) -> None:
    for rank, lines in enumerate(ranks2.run(gated, 1.0, 2, SLOW)):
        (line,) = lines
        assert f" is hidden on rank ep {rank} in 5 steps of 4 microbatches until " in line
        assert "and the plan hides " in line
        assert line.endswith("; result.metrics() has the causes; later ones are not said")


def test_an_error_is_raised_on_all_ranks_each_time(ranks2: Ranks) -> None:
    one, other = ranks2.run(gated, "error:1", 2, SLOW)
    assert one == other
    assert [line.partition(":")[0] for line in one] == ["6", "7", "8"]  # the first step shows exchanges
    assert "; allowed: 1 of it, as by gate; " in one[0]


def test_each_number_of_microbatches_is_judged_by_its_own_plan(ranks2: Ranks) -> None:
    one, other = ranks2.run(gated, "error:1", 2, SLOW, (4, 2) * 6)
    assert one == other
    assert [line.partition(":")[0] for line in one] == ["10", "11", "12"]  # the first step shows exchanges
    assert ["of 2 microbatches" in line for line in one] == [True, False, True]


def test_a_step_of_which_ranks_tell_nothing_is_not_judged(ranks2: Ranks) -> None:
    """Nobody waits for its times."""
    assert ranks2.run(gated, "error:1", 2, SLOW, (4,) * 8, 1e-9) == [[], []]


def test_a_gate_on_one_rank_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^gate=0\.8 where nothing is exchanged; allowed: ranks that share experts"):
        make(models.build(), build_schedule("sequential", microbatches=2), gate=0.8)
