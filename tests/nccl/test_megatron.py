"""Real models of Megatron-Core on NCCL and its own random numbers: its schedules and ours give the same to the bit."""

import logging
import warnings
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.integrations.megatron.core.cases import AUX, OVERLAP_REDUCE, OVERLAPPED, Z_LOSS, Case
from tests.nccl.joined import on_nccl
from tests.ranks import run

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
CASES: dict[str, Case] = {
    "plain": Case(measures=True),
    "aux and z loss": Case({**AUX, **Z_LOSS}, measures=True),
    "shared expert, overlapped": Case(OVERLAPPED, layers=3, measures=True),
    "dropout, jitter": Case({"hidden_dropout": 0.2, "attention_dropout": 0.2, "moe_input_jitter_eps": 0.1}),
    "DDP, reduce overlapped": Case(ddp=OVERLAP_REDUCE, measures=True),
    "vp 2, dropout": Case({"hidden_dropout": 0.2}, layers=4, pp=2, vp=2, microbatches=4),
}


def _differences(rank: int, size: int, name: str) -> list[str]:
    """Run a case by Megatron-Core's own schedule and by this project's; return one line on each that differs."""
    warnings.simplefilter("ignore")  # about kernels of Apex and TransformerEngine that are not there
    torch.compile = lambda function=None, **_: function or (lambda inner: inner)  # type: ignore[assignment]
    from tests.integrations.megatron.core import models, steps

    case = CASES[name]
    with on_nccl(rank, size, ranks=size) as (_, device):
        torch.use_deterministic_algorithms(True, warn_only=True)
        _put_on(device)
        with models.init_parallel(tp=case.tp, etp=case.etp, pp=case.pp, ep=case.ep, vp=case.vp):
            first, expected = (steps.serial_step(case) for _ in range(2))
            if any(models.compared(a.grads, b.grads) for a, b in zip(first, expected, strict=True)):
                return ["two runs of Megatron-Core's own schedule differ"]
            found = []
            for number, (theirs, ours) in enumerate(zip(expected, steps.our_step(case, 3), strict=True)):
                found += [f"losses {theirs.losses}, {ours.losses}"] if theirs.losses != ours.losses else []
                found += [f"step {number}: {line}" for line in models.compared(theirs.grads, ours.grads)]
            return found


def _put_on(device: torch.device) -> None:
    """Let models, batches and random numbers of the tests for a CPU be on a GPU, for good in this process."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    from tests.integrations.megatron.core import models, shim, steps

    shim.name_what_is_missing()
    build, batches, forget = models.build, models.batches, steps._forget

    def seed_random(seed: int) -> None:
        torch.manual_seed(1000 * seed)
        model_parallel_cuda_manual_seed(1000 * seed, force_reset_rng=True)

    def on_gpu(*args: Any, **more: Any) -> list[nn.Module]:
        return [chunk.to(device) for chunk in build(*args, **more)]

    def moved(*args: Any, **more: Any) -> list[dict[str, Any]]:
        return [
            {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}
            for batch in batches(*args, **more)
        ]

    def forgotten() -> None:
        forget()
        for scaler in (MoEAuxLossAutoScaler, MTPLossAutoScaler):
            scaler.main_loss_backward_scale = torch.ones(1, device=device)

    models.build, models.batches, models.seed_random, steps._forget = on_gpu, moved, seed_random, forgotten
    logging.getLogger("megatron.core").setLevel(logging.ERROR)


@pytest.mark.parametrize("name", CASES)
def test_steps(name: str) -> None:
    """In processes of its own, since what is put on the GPU stays there."""
    size = CASES[name].ranks
    assert run(_differences, size, name, timeout=120) == [[]] * size
