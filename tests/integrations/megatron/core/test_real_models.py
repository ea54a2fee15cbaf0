"""Steps of real models of Megatron-Core against its own schedules: losses and gradients are equal bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import pytest

from overlap1f1b.plan import Overlap
from tests.integrations.megatron.core import flex, models, shim
from tests.integrations.megatron.core.cases import CASES
from tests.ranks import run

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
TOGETHER = 6  # cases that share their processes: a start takes longer than a case
OVERLAPS: tuple[Overlap, ...] = ("pairs", 3)


def differences(rank: int, size: int, names: Sequence[str], overlaps: Sequence[Overlap]) -> list[str]:
    """Run each case by Megatron-Core's own schedule and by this project's; return one line on each that differs."""
    shim.apply()
    from tests.integrations.megatron.core.steps import our_step, serial_step

    found = []
    for name in names:
        case = CASES[name]
        flex.apply(delay_ms=2.0)  # anew: a buffer belongs to groups
        with models.init_parallel(tp=case.tp, etp=case.etp, pp=case.pp, ep=case.ep, vp=case.vp):
            expected = serial_step(case)
            for overlap in overlaps:
                lines = []
                for number, (theirs, ours) in enumerate(zip(expected, our_step(case, overlap), strict=True)):
                    lines += [f"losses {theirs.losses}, {ours.losses}"] if theirs.losses != ours.losses else []
                    lines += [f"step {number}: {line}" for line in models.compared(theirs.grads, ours.grads)]
                if lines:
                    found.append(f"{name}, overlap {overlap}: {len(lines)} differ, {'; '.join(lines[:3])}")
    return found


def _groups(*, quick: bool) -> list[Any]:
    """Return parameters of a test: cases of equal size together, and each case alone that does not work yet."""
    chosen = {name: case for name, case in CASES.items() if case.quick is quick}
    sizes = {case.ranks for case in chosen.values()}
    fine = [[n for n, case in chosen.items() if case.ranks == size and not case.fails] for size in sorted(sizes)]
    together = [tuple(names[at : at + TOGETHER]) for names in fine for at in range(0, len(names), TOGETHER)]
    groups = [pytest.param(names, id=f"{CASES[names[0]].ranks} ranks: {names[0]} …") for names in together]
    for name, case in chosen.items():
        if case.fails:
            groups.append(pytest.param((name,), id=name, marks=pytest.mark.xfail(reason=case.fails, strict=True)))
    return groups


@pytest.mark.parametrize("names", _groups(quick=True))
def test_steps(names: tuple[str, ...]) -> None:
    size = CASES[names[0]].ranks
    assert run(differences, size, names, (3,), timeout=120) == [[]] * size


@pytest.mark.slow
@pytest.mark.parametrize("names", _groups(quick=False))
def test_more_steps(names: tuple[str, ...]) -> None:
    size = CASES[names[0]].ranks
    assert run(differences, size, names, OVERLAPS, timeout=200) == [[]] * size
