"""Steps of real models of Megatron-Core against its own schedules: losses and gradients are equal bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from overlap1f1b.plan import Overlap
from tests.integrations.megatron.core import flex, models, shim
from tests.integrations.megatron.core.cases import BLOCKS, CASES, FULL, PROGRAMS, Case, Fields, selective
from tests.integrations.megatron.core.steps import of_pipeline, our_step, serial_step, unlike
from tests.ranks import Ranks
from tests.tiers import first

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")


def differences(rank: int, size: int, case: Case, overlap: Overlap) -> list[str]:
    """Run a case by Megatron-Core's own schedule and by this project's; return lines on what differs.

    Of a program what all ranks of a pipeline have is compared, by its place.
    """
    shim.apply()
    flex.apply(delay_ms=2.0)  # anew: a buffer belongs to groups
    with models.init_parallel(tp=case.tp, etp=case.etp, pp=case.pp, ep=case.ep, vp=case.vp):
        pair = serial_step(case), our_step(case, overlap)
        return unlike(*(map(of_pipeline, pair) if case.program else pair))[:3]


@pytest.mark.parametrize(
    ("name", "overlap"),
    first(((name, "pairs" if at % 3 == 2 else 3) for at, name in enumerate(CASES)), ("plain", 3)),
)
def test_steps(kept: dict[int, Ranks], name: str, overlap: Overlap) -> None:
    """Two of three cases by the default overlap, the others in pairs."""
    size = CASES[name].ranks
    assert kept[size].run(differences, CASES[name], overlap) == [[]] * size


@pytest.mark.parametrize("name", first(PROGRAMS, "zb_h1, ep 1"))
def test_programs(kept: dict[int, Ranks], name: str) -> None:
    size = PROGRAMS[name].ranks
    assert kept[size].run(differences, PROGRAMS[name], 3) == [[]] * size


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
    case = RECOMPUTED[name]
    fields: Fields = {"hidden_dropout": 0.2, "attention_dropout": 0.3}
    case, known = replace(case, fields=case.fields | fields), dict[Any, Tensor]()
    with models.init_parallel(pp=case.pp, ep=case.ep, vp=case.vp):
        with _dropout(known, repeats=False):
            ours = our_step(case, 3)
        with _dropout(known, repeats=True):
            return unlike(serial_step(case), ours)


@pytest.mark.parametrize("name", first(RECOMPUTED, "first layer"))
def test_a_recomputation_repeats_the_masks_of_its_forward(kept: dict[int, Ranks], name: str) -> None:
    size = RECOMPUTED[name].ranks
    assert kept[size].run(_masks, name) == [[]] * size
