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
from tests.ranks import over
from tests.tiers import first

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")


@pytest.mark.parametrize(
    ("case", "overlap"),
    [
        *first(((name, "pairs" if at % 3 == 2 else 3) for at, name in enumerate(CASES)), ("plain", 3)),
        *first(((name, 3) for name in PROGRAMS), ("zb_h1, ep 1", 3)),
    ],
)
@over(lambda name, _: (CASES | PROGRAMS)[name].ranks)
def test_steps(rank: int, size: int, case: str, overlap: Overlap) -> None:
    """By Megatron-Core's own schedule and by this project's: two of three cases by the default overlap.

    Of a program what all ranks of a pipeline have is compared, by its place.
    """
    of = (CASES | PROGRAMS)[case]
    shim.apply()
    flex.apply(delay_ms=2.0)  # anew: a buffer belongs to groups
    with models.init_parallel(tp=of.tp, etp=of.etp, pp=of.pp, ep=of.ep, vp=of.vp):
        pair = serial_step(of), our_step(of, overlap)
        problems = unlike(*(map(of_pipeline, pair) if of.program else pair))[:3]
    assert not problems, problems


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


@pytest.mark.parametrize("name", first(RECOMPUTED, "first layer"))
@over(lambda name: RECOMPUTED[name].ranks)
def test_a_recomputation_repeats_the_masks_of_its_forward(rank: int, size: int, name: str) -> None:
    """Under the masks of ours Megatron-Core's own steps give the same."""
    shim.apply()
    case = RECOMPUTED[name]
    fields: Fields = {"hidden_dropout": 0.2, "attention_dropout": 0.3}
    case, known = replace(case, fields=case.fields | fields), dict[Any, Tensor]()
    with models.init_parallel(pp=case.pp, ep=case.ep, vp=case.vp):
        with _dropout(known, repeats=False):
            ours = our_step(case, 3)
        with _dropout(known, repeats=True):
            problems = unlike(serial_step(case), ours)
    assert not problems, problems
