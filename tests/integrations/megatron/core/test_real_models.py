"""Steps of real models of Megatron-Core against its own schedules: losses and gradients are equal bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec

import pytest

from overlap1f1b.plan import Overlap
from tests.integrations.megatron.core import flex, models, shim
from tests.integrations.megatron.core.cases import CASES
from tests.ranks import Ranks

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
OVERLAPS: tuple[Overlap, ...] = (3, "pairs")


def differences(rank: int, size: int, name: str, overlaps: Sequence[Overlap]) -> list[str]:
    """Run a case by Megatron-Core's own schedule and by this project's; return one line on each that differs."""
    shim.apply()
    from tests.integrations.megatron.core.steps import our_step, serial_step

    case, found = CASES[name], []
    flex.apply(delay_ms=2.0)  # anew: a buffer belongs to groups
    with models.init_parallel(tp=case.tp, etp=case.etp, pp=case.pp, ep=case.ep, vp=case.vp):
        expected = serial_step(case)
        for overlap in overlaps:
            lines = []
            for number, (theirs, ours) in enumerate(zip(expected, our_step(case, overlap), strict=True)):
                lines += [f"losses {theirs.losses}, {ours.losses}"] if theirs.losses != ours.losses else []
                lines += [f"step {number}: {line}" for line in models.compared(theirs.grads, ours.grads)]
            if lines:
                found.append(f"overlap {overlap}: {len(lines)} differ, {'; '.join(lines[:3])}")
    return found


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.quick])
def test_steps(megatron: Callable[[int], Ranks], name: str) -> None:
    size = CASES[name].ranks
    assert megatron(size).run(differences, name, OVERLAPS) == [[]] * size


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.quick])
def test_more_steps(megatron: Callable[[int], Ranks], name: str) -> None:
    size = CASES[name].ranks
    assert megatron(size).run(differences, name, OVERLAPS) == [[]] * size
