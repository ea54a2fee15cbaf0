"""A token with several experts on a rank is sent there once: gradients, and bytes as counted."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b.moe import MoE, RouterConfig
from overlap1f1b.moe.experts import Precision
from overlap1f1b.plan import exchanged_bytes
from overlap1f1b.running.exchanges import RecordingExchange
from overlap1f1b.schedule import build_schedule
from overlap1f1b.transport.exchange import build_exchange
from tests import models
from tests.engines import COSTS, Case, make, orders_apart
from tests.ranks import over

MICROBATCHES = 3
CASES: list[Case] = [
    ("sequential", "serial", {}),
    ("combined_1f1b", 3, {}),
    ("zb_h1", 3, {"recompute": "block"}),
    ("combined_1f1b", "pairs", {"recompute": "experts", "capacity": 8.0}),
    ("combined_1f1b", 2, {"capacity": 2.0}),
]


def many(tokens: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Five of eight experts: at most four of them are on one of two ranks."""
    weights, indices = logits.softmax(-1).topk(5, -1)
    return indices, weights


@over(2, timeout=240)
def test_many_choices_over_two_ranks(rank: int, size: int) -> None:
    mesh, problems = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)), list[str]()
    build = functools.partial(models.build, choose=(many, models.top_k))
    for dtype, limit, cases in ((torch.float64, 1e-12, CASES), (torch.float32, 1e-6, CASES[:2])):
        with models.default_dtype(dtype):
            problems += orders_apart(build, cases, mesh, MICROBATCHES, limit)
    assert not problems, problems


@over(2, timeout=120)
def test_bytes_of_a_step_are_those_that_were_counted(rank: int, size: int) -> None:
    """Within one per cent, with what rows carry; experts are all equally likely."""
    mesh, problems = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)), []
    experts, hidden, tokens, microbatches = 16, 32, 16_384, 2
    cases: tuple[tuple[int, float, Precision | None], ...] = (
        (1, 1.0, None),
        (2, 0.77, None),
        (8, 0.25, None),
        (2, 0.5, "fp8"),
        (2, 0.5, "mxfp8"),
    )
    for chosen, share, precision in cases:
        layer = MoE(hidden, 32, RouterConfig(experts, chosen), precision=precision, group=mesh.get_group("ep"))
        generator = torch.Generator().manual_seed(rank)

        def choose(x: Tensor, chosen: int = chosen, generator: torch.Generator = generator) -> tuple[Tensor, Tensor]:
            indices = torch.rand(len(x), experts, generator=generator).argsort(1)[:, :chosen]
            return indices, x[:, :chosen].sigmoid()

        layer.router.forward = choose  # type: ignore[assignment, method-assign]
        recording = RecordingExchange(build_exchange(mesh.get_group("ep")))
        engine = make(
            torch.nn.Sequential(torch.nn.Linear(hidden, hidden), layer),
            build_schedule("combined_1f1b", microbatches=microbatches),
            mesh=mesh,
            exchange=recording,
            loss_fn=torch.nn.functional.mse_loss,
            costs=COSTS,
            verify=False,
        )
        x = torch.randn(microbatches * tokens, hidden)
        engine.step(x, target=x)
        total = torch.tensor(sum(sizes.sent_bytes(rank) for sizes in recording.sizes.values()))
        dist.all_reduce(total)
        sent = int(total) / size
        options = {"itemsize": 4, "weight_itemsize": 4, "precision": precision}
        counted = 2 * microbatches * sum(exchanged_bytes(tokens, hidden, experts, chosen, size, **options))
        before = 4 * microbatches * tokens * chosen * hidden * 4 / 2
        if not abs(sent / counted - 1) < 0.01 or not sent / before < share + 0.25:
            problems.append(
                f"{chosen} chosen, {precision}: {sent} bytes, {counted} were counted, {before} for each choice"
            )
    assert not problems, problems


@over(2)
def test_ranks_whose_rows_have_other_widths_are_refused(rank: int, size: int) -> None:
    """By which gloo would abort the process: other numbers of experts a token, and other precisions."""
    mesh, problems = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)), list[str]()
    for chosen, precision, capacity, said in (
        (1 + 3 * rank, None, None, ("is 1 experts a token", "4 experts")),
        (1 + 3 * rank, None, 2.0, ("is 1 experts a token", "4 experts")),
        (2, "fp8" if rank else None, None, ("sent in fp8",)),
    ):
        moe = MoE(16, 16, RouterConfig(8, chosen), precision=precision, group=mesh.get_group("ep"))  # type: ignore[arg-type]
        program = build_schedule("combined_1f1b", microbatches=2)
        engine = make(nn.Sequential(nn.Linear(16, 16), moe), program, mesh=mesh, capacity=capacity, timeout=20)
        x = torch.randn(8, 16)
        with pytest.raises(ValueError, match="experts a token") as caught:
            engine.step(x, target=x)
        problems += [] if all(part in str(caught.value) for part in said) else [str(caught.value)]
    assert not problems, problems
