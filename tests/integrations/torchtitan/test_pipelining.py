"""torchtitan's own trainer with our ``pipelining_fn``, beside the same trainer without."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle, get_schedule_class

from overlap1f1b.integrations.torchtitan import SCHEDULES, pipelining_fn
from tests.engines import COSTS
from tests.integrations.torchtitan import on_cpu
from tests.integrations.torchtitan.conftest import Plain
from tests.integrations.torchtitan.trainers import SEQUENCES, STEPS, STOPPED, own, train, weights_of
from tests.ranks import Kept, Ranks
from tests.tiers import wide

installed = pytest.mark.skipif(bool(on_cpu.MISSING), reason=on_cpu.REASON)


def equal(found: Sequence[float], expected: Sequence[float], tolerance: float) -> bool:
    return len(found) == len(expected) and torch.allclose(
        torch.tensor(found), torch.tensor(expected), rtol=tolerance, atol=0
    )


def assert_close(found: Sequence[float], expected: Sequence[float]) -> None:
    """Compare the norms of steps: sums of another order differ in the last bits, and AdamW enlarges this."""
    assert equal(found[:1], expected[:1], 1e-6)
    assert equal(found, expected, 1e-4)


def as_own(ranks: Ranks, folder: str, expected: dict[str, Any], last: int = -1, **case: Any) -> list[dict[str, Any]]:
    """Train; the norms of all ranks, and the losses of the ``last``, are those of torchtitan's own trainer."""
    found = [logged for (logged,) in ranks.run(train, [{"folder": folder, **case}])]
    assert equal(found[last]["loss"], expected["loss"], 1e-6)
    for rank in found:
        assert_close(rank["norm"], expected["norm"])
    return found


def assert_same_weights(folder: str, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    written, weights = weights_of(folder, ours), weights_of(folder, theirs)
    assert written.keys() == weights.keys()
    for key, value in weights.items():
        assert float((written[key] - value).norm()) <= 1e-3 * float(value.norm()), key


@installed
@pytest.mark.parametrize(
    "case",
    [
        {"chunked": True, "options": {"schedule": "zb_h1", "overlap": 2}},
        *wide(
            {"schedule": "DualPipeV", "backend": "spmd_types"},
            {"schedule": "ZBVZeroBubble", "checkpointing": "selective", "chunked": True},
            {"schedule": "GPipe", "batch": SEQUENCES // 2, "total": SEQUENCES, "checkpointing": "full"},
        ),
    ],
    ids=str,
)
def test_two_stages(titan: Kept, folder: str, plain: Plain, case: dict[str, Any]) -> None:
    last = 0 if case.get("schedule") in ("DualPipeV", "ZBVZeroBubble") else 1
    as_own(titan[2], folder, plain(), last, run=str(case), by="pipelining_fn", pp=2, **case)


@pytest.mark.wide
@installed
def test_bfloat16(titan: Kept, folder: str, plain: Plain) -> None:
    expected = plain(dtype="bfloat16")
    case = {"folder": folder, "run": "bf16", "by": "pipelining_fn", "pp": 2, "dtype": "bfloat16"}
    ((_,), (found,)) = titan[2].run(train, [case])
    assert equal(found["loss"][:1], expected["loss"][:1], 1e-6)
    assert equal(found["norm"][:1], expected["norm"][:1], 1e-5)
    assert equal(found["loss"], expected["loss"], 1e-3)
    assert equal(found["norm"], expected["norm"], 1e-2)


@pytest.mark.wide
@installed
def test_experts_over_two_ranks(titan: Kept, folder: str, plain: Plain) -> None:
    """Loss, norm and weights are those of torchtitan's trainer with its FSDP2 over the same ranks."""
    family: dict[str, Any] = {"family": "qwen3"}
    case = {**family, "chunked": True, "checkpointing": "selective", "schedule": "Interleaved1F1B"}
    ours = {"run": "ours", "pp": 2, "ep": 2, "batch": SEQUENCES // 2, "writes": True, **case}
    theirs = {"ep": 2, "writes": True, **family}
    expected = plain(2, **theirs)
    assert equal(expected["norm"], plain(**family)["norm"], 1e-4)
    for rank in as_own(titan[4], folder, expected, 2, by="pipelining_fn", **ours):
        assert sum(rank["cut"]) == 2 * 2  # two layers with experts, there and back
        assert rank["ops"]["DISPATCH"] == rank["ops"]["COMBINE"] > 0
    assert_same_weights(folder, ours, own(folder, **theirs))


@installed
@pytest.mark.parametrize(
    ("pp", "options"), [(1, {"parts": 2}), *wide((2, {"overlap": "pairs", "capacity": 4.0, "recompute": "experts"}))]
)
def test_our_exchange_in_its_layers(titan: Kept, folder: str, plain: Plain, pp: int, options: dict[str, Any]) -> None:
    """Loss, norm and weights are as by torchtitan's own dispatcher; the checkpoint has the same entries.

    torchtitan's experts multiply in bfloat16, so sums of another order differ more than elsewhere.
    """
    theirs: dict[str, Any] = {"writes": True, "ep": 2}
    given, by = {"dispatcher": "rows", **options}, "mixin" if pp == 1 else "pipelining_fn"
    ours = {"run": f"rows {options}", "by": by, "options": given, "pp": pp, "batch": SEQUENCES // 2, **theirs}
    expected = plain(2, **theirs)
    every = [found for (found,) in titan[2 * pp].run(train, [{"folder": folder, **ours}])]
    assert equal(every[-1]["loss"], expected["loss"], 1e-5)
    for found in every:
        assert equal(found["norm"][:1], expected["norm"][:1], 1e-5)
        assert equal(found["norm"], expected["norm"], 1e-4)
        assert sum(found["cut"]) == 0  # torchtitan's own exchanges are gone
        assert found["ops"]["COUNTS"] > 0
    assert_same_weights(folder, ours, own(folder, **theirs))


@pytest.mark.wide
@installed
def test_resume(titan: Kept, folder: str, plain: Plain) -> None:
    """From torchtitan's checkpoint of the second step everything goes on as in a run that validates after each."""
    unbroken: dict[str, Any] = {"run": "unbroken", "by": "pipelining_fn", "pp": 2, "saves": True, "validates": True}
    again = {**unbroken, "run": "again", "resumes": "unbroken"}
    for rank, (expected, found) in enumerate(
        titan[2].run(train, [{"folder": folder, **case} for case in (unbroken, again)])
    ):
        assert_close(expected["norm"], plain()["norm"])
        assert found["norm"] == expected["norm"][STOPPED:]
        if rank == 1:
            assert equal(expected["loss"], plain()["loss"], 1e-6)
            assert found["loss"] == expected["loss"][STOPPED:]
            valid = plain(batch=SEQUENCES, validates=True)["valid"]
            assert len(valid) == STEPS
            assert equal(expected["valid"], valid, 1e-5)
            assert found["valid"] == expected["valid"][STOPPED:]
    written, whole = weights_of(folder, again), weights_of(folder, unbroken)
    assert written.keys() == whole.keys()
    assert all(torch.equal(written[name], value) for name, value in whole.items())


@pytest.mark.wide
@installed
def test_tensor_parallelism(titan: Kept, folder: str, plain: Plain) -> None:
    """Loss and norm are those of torchtitan's own trainer over a tensor group, which shares the experts."""
    # DTensors take their time for each microbatch and step, so costs are given: the second step is overlapped.
    same: dict[str, Any] = {"family": "qwen3", "tp": 2, "ep": 2, "micro": SEQUENCES // 2, "steps": 2}
    ours = {"run": "tensor", "by": "pipelining_fn", "pp": 2, "options": {"costs": COSTS}}
    for rank in as_own(titan[4], folder, plain(2, **same), **ours, **same):
        assert sum(rank["cut"]) == 2 * 2


def _given(**changed: Any) -> dict[str, Any]:
    dims = {"pp": 2, "tp": 1, "cp": 1, "ep": 1, "pp_enabled": True}
    training = {"local_batch_size": 8, "enable_cpu_offload": False}
    parallelism = {
        "spmd_backend": "spmd_types",
        "pipeline_parallel_degree": 2,
        "pipeline_parallel_schedule": "1F1B",
        "pipeline_parallel_microbatch_size": 1,
        "pipeline_parallel_schedule_csv": "",
    }
    compiling = {"enable": False, "components": ["model", "loss"]}
    held = {"parallel_dims": dims, "training": training, "parallelism": parallelism, "compile_config": compiling}
    for values in held.values():
        values.update({key: value for key, value in changed.items() if key in values})  # type: ignore[attr-defined]
    given: dict[str, Any] = {name: SimpleNamespace(**values) for name, values in held.items()}  # type: ignore[arg-type]
    return given | {"ac_config": None, "loss_fn": None}


def _cut(*_: Any, **__: Any) -> Any:
    raise AssertionError("nothing is cut")


@pytest.mark.parametrize(
    ("changed", "options", "message"),
    [
        (
            {"tp": 2, "ep": 3},
            {},
            "parallelism.expert_parallel_degree=3 with tensor_parallel_degree=2; allowed: 1, or a multiple of it",
        ),
        ({"cp": 4}, {}, "parallelism.context_parallel_degree=4; allowed: 1"),
        ({"spmd_backend": "full_dtensor"}, {}, "spmd_backend='full_dtensor'; allowed: 'partial_dtensor', 'spmd_types'"),
        ({"ep": 2}, {}, "spmd_backend='spmd_types' with expert_parallel_degree=2; allowed: 'partial_dtensor'"),
        ({"enable": True}, {}, r"compile.components=\['model', 'loss'\]; allowed: without 'model'"),
        ({"enable_cpu_offload": True}, {}, "training.enable_cpu_offload=True; allowed: False"),
        ({"pipeline_parallel_schedule": "Zigzag"}, {}, "pipeline_parallel_schedule='Zigzag'; allowed: 1F1B, Interleav"),
        (
            {"pipeline_parallel_microbatch_size": 3},
            {},
            "training.local_batch_size=8 with parallelism.pipeline_parallel_microbatch_size=3; allowed: a multiple",
        ),
        ({}, {"schedule": "zb_v"}, "chunks=1 with zb_v; allowed: 2"),
    ],
)
def test_refused(changed: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        pipelining_fn(nn.Identity(), split=_cut, **options, **_given(**changed))
    assert "\n" not in str(raised.value)


def test_a_program_with_other_stages_is_refused() -> None:
    given = _given(pipeline_parallel_schedule="Interleaved1F1B")
    given["parallel_dims"].get_mesh = lambda name: SimpleNamespace(get_local_rank=lambda: 0)
    made = SimpleNamespace(_stages=[SimpleNamespace(stage_index=index) for index in (0, 2)])
    with pytest.raises(ValueError, match=r"puts stages \[0, 3\] on pipeline rank 0.*\[0, 2\]; allowed: sch"):
        pipelining_fn(
            nn.Identity(), split=lambda *_, **__: (made, [nn.Identity()] * 2, True, False), schedule="zb_v", **given
        )


def test_a_table(tmp_path: Path) -> None:
    """A table of torch's may be given; it must have as many microbatches as the batch."""
    (tmp_path / "table.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    given = _given(pipeline_parallel_schedule_csv=str(tmp_path / "table.csv"), local_batch_size=2)
    given["parallel_dims"].get_mesh = lambda name: SimpleNamespace(get_local_rank=lambda: 1)
    part = nn.Identity()
    made = SimpleNamespace(_stage=SimpleNamespace(stage_index=1))
    schedule, parts, first, last = pipelining_fn(part, split=lambda *_, **__: (made, [part], False, True), **given)
    assert (schedule.program.microbatches, parts, first, last) == (2, [part], False, True)
    given["training"].local_batch_size = 8
    with pytest.raises(ValueError, match=r"schedule_csv of 2 microbatches, .* is 8; allowed: as many"):
        pipelining_fn(part, split=_cut, **given)


def test_schedules_are_those_of_torch() -> None:
    for name in SCHEDULES:
        assert issubclass(get_schedule_class(name), PipelineScheduleSingle | PipelineScheduleMulti)
