"""torchtitan's trainer under the mixin, on one pipeline rank."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integrations.torchtitan import on_cpu
from tests.integrations.torchtitan.conftest import Plain
from tests.integrations.torchtitan.test_pipelining import assert_close, equal
from tests.integrations.torchtitan.trainers import MICRO, SEQUENCES, STEPS, own, train
from tests.ranks import Ranks

installed = pytest.mark.skipif(bool(on_cpu.MISSING), reason=on_cpu.REASON)
MICROBATCHES, LAYERS = SEQUENCES // 2 // MICRO, 2


@installed
def test_one_rank(titan1: Ranks, folder: str, plain: Plain) -> None:
    case = {"folder": folder, "run": "mixin", "by": "mixin", "checkpointing": "selective", "validates": True}
    found, expected = titan1.run(train, [case])[0][0], plain()
    assert equal(found["loss"], expected["loss"], 1e-6)
    assert_close(found["norm"], expected["norm"])
    assert len(found["valid"]) == STEPS
    assert equal(found["valid"], plain(batch=SEQUENCES, validates=True)["valid"], 1e-5)


@installed
def test_experts_over_two_ranks(titan2: Ranks, folder: str) -> None:
    """Loss and norm are those of torchtitan's own trainer over the same ranks; exchanges are nodes; it validates.

    Checkpoints of activations become the engine's own.
    """
    case: dict[str, Any] = {"chunked": True, "checkpointing": "selective", "batch": SEQUENCES // 2, "validates": True}
    ours = {"folder": folder, "run": "mixin of two", "by": "mixin", "ep": 2, **case}
    for expected, by_us in titan2.run(train, [own(folder, ep=2), ours]):
        assert equal(by_us["loss"], expected["loss"], 1e-6)
        assert_close(by_us["norm"], expected["norm"])
        assert by_us["cut"] == [2 * LAYERS]
        assert by_us["ops"]["DISPATCH"] == by_us["ops"]["COMBINE"] == 2 * MICROBATCHES * LAYERS
        assert by_us["ops"]["RECOMPUTE_ATTENTION"] == MICROBATCHES  # of the part
        assert len(by_us["valid"]) == STEPS


@installed
def test_tensor_parallelism(titan2: Ranks, folder: str) -> None:
    """Loss and norm are those of torchtitan's own trainer over the same tensor group, with all experts on a rank."""
    same: dict[str, Any] = {"family": "qwen3", "tp": 2, "micro": SEQUENCES // 2, "steps": 2}
    ours = {"folder": folder, "run": "tensor mixin", "by": "mixin", **same}
    for expected, by_us in titan2.run(train, [own(folder, **same), ours]):
        assert equal(by_us["loss"], expected["loss"], 1e-6)
        assert_close(by_us["norm"], expected["norm"])
        assert by_us["cut"] == [0]
