"""torchtitan's trainer under the mixin, on one pipeline rank."""

from typing import Any

import pytest

from tests.integrations.torchtitan import on_cpu
from tests.integrations.torchtitan.conftest import Plain
from tests.integrations.torchtitan.test_pipelining import as_own, equal
from tests.integrations.torchtitan.trainers import MICRO, SEQUENCES, STEPS
from tests.ranks import Kept

pytestmark = pytest.mark.skipif(bool(on_cpu.MISSING), reason=on_cpu.REASON)
MICROBATCHES, LAYERS = SEQUENCES // 2 // MICRO, 2


def test_one_rank(titan: Kept, folder: str, plain: Plain) -> None:
    case = {"run": "mixin", "by": "mixin", "checkpointing": "selective", "validates": True}
    (found,) = as_own(titan[1], folder, plain(), **case)
    assert len(found["valid"]) == STEPS
    assert equal(found["valid"], plain(batch=SEQUENCES, micro=SEQUENCES, validates=True)["valid"], 1e-5)


def test_experts_over_two_ranks(titan: Kept, folder: str, plain: Plain) -> None:
    """Loss and norm are those of torchtitan's own trainer over the same ranks; exchanges are nodes; it validates.

    Checkpoints of activations become the engine's own.
    """
    case: dict[str, Any] = {"chunked": True, "checkpointing": "selective", "batch": SEQUENCES // 2, "validates": True}
    expected = plain(2, ep=2, writes=True)
    for found in as_own(titan[2], folder, expected, run="mixin of two", by="mixin", ep=2, **case):
        assert equal(found["loss"], expected["loss"], 1e-6)
        assert found["cut"] == [2 * LAYERS]
        assert found["ops"]["DISPATCH"] == found["ops"]["COMBINE"] == 2 * MICROBATCHES * LAYERS
        assert found["ops"]["RECOMPUTE_ATTENTION"] == MICROBATCHES  # of the part
        assert len(found["valid"]) == STEPS


def test_tensor_parallelism(titan: Kept, folder: str, plain: Plain) -> None:
    """Loss and norm are those of torchtitan's own trainer over the same tensor group, with all experts on a rank."""
    same: dict[str, Any] = {"family": "qwen3", "tp": 2, "micro": SEQUENCES // 2, "steps": 2}
    expected = plain(2, **same)
    for found in as_own(titan[2], folder, expected, run="tensor mixin", by="mixin", **same):
        assert equal(found["loss"], expected["loss"], 1e-6)
        assert found["cut"] == [0]
