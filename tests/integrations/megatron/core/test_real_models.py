"""Steps of real models of Megatron-Core against its own schedules: losses and gradients are equal bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from overlap1f1b.plan import Overlap
from tests.integrations.megatron.core import flex, models, shim
from tests.integrations.megatron.core.cases import BLOCKS, CASES, FULL, Case, Fields, selective
from tests.ranks import Ranks

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
OVERLAPS: tuple[Overlap, ...] = (3, "pairs")
QUICK = [name for name, case in CASES.items() if case.quick]
MORE = [name for name, case in CASES.items() if not case.quick]


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


@pytest.mark.parametrize("name", QUICK)
def test_steps(megatron: Callable[[int], Ranks], name: str) -> None:
    size = CASES[name].ranks
    assert megatron(size).run(differences, name, OVERLAPS) == [[]] * size


@pytest.mark.slow
@pytest.mark.parametrize(("name", "overlap"), [(name, 3 if at % 3 else "pairs") for at, name in enumerate(MORE)])
def test_more_steps(megatron: Callable[[int], Ranks], name: str, overlap: Overlap) -> None:
    """Two of three cases by the default overlap, the others in pairs."""
    size = CASES[name].ranks
    assert megatron(size).run(differences, name, (overlap,)) == [[]] * size


class Unseeded(Case):
    """A case whose forward steps do not seed dropout, so that it draws from the engine's streams."""

    dropout = False


RECOMPUTED: dict[str, Case] = {
    "first layer": Unseeded(BLOCKS),
    "MoE layers": Unseeded(selective("moe")),
    "core attention": Unseeded(selective("core_attn")),
    "layers, vp 2": Unseeded(FULL, layers=4, pp=2, vp=2, microbatches=4),
}


@contextmanager
def _dropout(known: dict[Any, Tensor], *, repeats: bool) -> Iterator[None]:
    """Add the mask that a call of dropout draws to ``known``, by its input; or repeat the first one of this input."""
    real = F.dropout

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or not p:
            return x
        key = (p, x.shape, x.detach().numpy().tobytes())
        if repeats:
            return x * known[key]
        mask = torch.dropout(torch.ones_like(x, requires_grad=False), p, train=True)
        known.setdefault(key, mask)
        return x * mask

    F.dropout = dropout
    try:
        yield
    finally:
        F.dropout = real


def _masks(rank: int, size: int, name: str) -> list[str]:
    """Return the differences of our steps from Megatron-Core's own under the same masks."""
    shim.apply()
    from dataclasses import replace

    from tests.integrations.megatron.core.steps import our_step, serial_step

    case = RECOMPUTED[name]
    fields: Fields = {"hidden_dropout": 0.2, "attention_dropout": 0.3}
    case, known, found = replace(case, fields=case.fields | fields), dict[Any, Tensor](), []
    with models.init_parallel(pp=case.pp, ep=case.ep, vp=case.vp):
        with _dropout(known, repeats=False):
            ours = our_step(case, 3)
        with _dropout(known, repeats=True):
            theirs = serial_step(case)
        for number, (one, other) in enumerate(zip(theirs, ours, strict=True)):
            found += [f"losses {one.losses}, {other.losses}"] if one.losses != other.losses else []
            found += [f"step {number}: {line}" for line in models.compared(one.grads, other.grads)]
    return found


@pytest.mark.parametrize("name", RECOMPUTED)
def test_a_recomputation_repeats_the_masks_of_its_forward(megatron: Callable[[int], Ranks], name: str) -> None:
    size = RECOMPUTED[name].ranks
    assert megatron(size).run(_masks, name) == [[]] * size
