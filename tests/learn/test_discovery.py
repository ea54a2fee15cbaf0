"""Figures of a model with exchanges that run where they stand: not measured, and never a share that leaves them out."""

import warnings
from collections.abc import Callable
from math import isnan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b import exchange
from overlap1f1b.cli.report.figures import content_of
from overlap1f1b.moe import GroupedExperts
from overlap1f1b.profiling import read
from overlap1f1b.record.recorder import Recorder, TorchRanges
from overlap1f1b.schedule import build_schedule
from tests.all_to_all import Own
from tests.play.plain import HIDDEN, batch, engine_of
from tests.ranks import Ranks
from tests.reduce.ring import pass_on
from tests.tiers import wide

Way = Callable[[Tensor, Any], Tensor]


class Undeclared(Own):
    """An all-to-all that nobody has declared."""


class Sums(torch.autograd.Function):
    """Sums rows of all ranks, in its backward, too."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group, rows = group, rows.clone()
        dist.all_reduce(rows, group=group)
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return Sums.apply(grads[0], ctx.group), None


def uneven(rows: Tensor, group: Any) -> Tensor:
    """Exchange rows of which ranks send different numbers to the first rank, none to themselves, and back."""
    ranks, rank = group.size(), group.rank()
    send = [0 if to == rank else 1 + (rank if to == 0 else 0) for to in range(ranks)]
    receive = [0 if of == rank else 1 + (of if rank == 0 else 0) for of in range(ranks)]
    there = Undeclared.apply(group, rows[: sum(send)], receive, send)
    return torch.cat([Undeclared.apply(group, there.tanh(), send, receive), rows[sum(send) :]])


def gathered(rows: Tensor, group: Any) -> Tensor:
    return sum(differentiable.all_gather(rows, group=group)) / group.size()


def functionally(rows: Tensor, group: Any) -> Tensor:
    gather, scatter = [
        getattr(functional, newer, None) or getattr(functional, older)  # by torch's release
        for newer, older in (
            ("all_gather_single_autograd", "all_gather_tensor_autograd"),
            ("reduce_scatter_single_autograd", "reduce_scatter_tensor_autograd"),
        )
    ]
    return scatter(gather(rows, 0, group), "sum", 0, group) / group.size()


def without_gradient(rows: Tensor, group: Any) -> Tensor:
    others = [torch.empty_like(rows) for _ in range(group.size())]
    with torch.no_grad():
        dist.all_gather(others, rows.contiguous(), group=group)
    return rows + sum(others)


def round_about(rows: Tensor, group: Any) -> Tensor:
    return rows + pass_on(rows.detach(), group)


STANDING: dict[str, tuple[Way, str]] = {
    "uneven": (uneven, f"{__name__}.Undeclared exchanges rows where it stands"),
    "all_gather": (gathered, "torch.distributed.nn.functional._AllGather exchanges rows where it stands"),
    "functional": (functionally, "all_gather_into_tensor outside of a Function, in block 0 (Block), exchanges rows"),
    "without a gradient": (without_gradient, "all_gather without a gradient, in block 0 (Block), exchanges rows"),
    "to a neighbour": (round_about, "send outside of a Function, in block 0 (Block), exchanges rows"),
    "sums": (Sums.apply, f"{__name__}.Sums exchanges rows where it stands"),
}
"""Ways to move rows that nothing hides, and what is said of them."""


def sized(rows: Tensor, group: Any) -> Tensor:
    """Exchange sizes by a collective, then rows by the public call: these are hidden."""
    ranks = group.size()
    send = torch.full((ranks,), len(rows) // ranks)
    send[0] += len(rows) % ranks
    receive = torch.empty_like(send)
    dist.all_to_all_single(receive, send, group=group)
    there = exchange(rows, send.tolist(), receive.tolist(), group)
    return exchange(there.tanh(), receive.tolist(), send.tolist(), group)


class Statistics(nn.Module):
    """Gathers means of every rank, as a SyncBatchNorm does, and sums a flat bucket."""

    def forward(self, rows: Tensor, group: Any) -> Tensor:
        mean = rows.detach().mean(0)
        every = [torch.empty_like(mean) for _ in range(group.size())]
        dist.all_gather(every, mean, group=group)
        dist.all_reduce(mean, group=group)
        return rows - sum(every) / group.size()


MEASURED: dict[str, Way] = {"sizes": sized, "statistics": lambda rows, group: sized(Statistics()(rows, group), group)}


class Block(nn.Module):
    """A layer around what moves rows; perhaps with experts of ours beside it."""

    def __init__(self, way: Way, group: Any, experts: bool) -> None:
        super().__init__()
        self.way, self.group, self.inner = way, group, nn.Linear(HIDDEN, HIDDEN)
        self.experts = GroupedExperts(group.size(), HIDDEN, 8, group=group) if experts else None

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.way(self.inner(x), self.group)
        if self.experts is None:
            return x
        indices = torch.arange(len(x)).remainder(self.group.size())[:, None]
        return x + self.experts(x, indices, torch.ones(len(x), 1))


def problems_of(rank: int, size: int, experts: bool) -> list[str]:
    """Return what is wrong with the figures of steps, evaluations, metrics, records and the report."""
    mesh, found = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)), list[str]()
    data = batch(rank, microbatches=3)
    for name, way in ({name: way for name, (way, _) in STANDING.items()} | MEASURED).items():
        torch.manual_seed(1)
        engine = engine_of(nn.Sequential(Block(way, mesh.get_group("ep"), experts)), mesh)
        line = STANDING[name][1] if name in STANDING else "beside Experts" if experts else None
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            first = engine.step(data[0], target=data[1])
        said = [str(one.message) for one in told if "exchanges rows where it stands" in str(one.message)]
        with Recorder(engine, TorchRanges()) as recorder:
            result = engine.step(data[0], target=data[1])
        with warnings.catch_warnings(record=True) as told, TemporaryDirectory() as folder:
            warnings.simplefilter("always")
            metrics = result.metrics()
            recorder.save(Path(folder) / f"rank{rank}.json")
            report = content_of(read(Path(folder)))
        found += [f"{name}: first step {first.overlap}"] * (not first.overlap.standing)
        for overlap in (result.overlap, engine.step(data[0], target=data[1]).overlap):
            measured = not any(map(isnan, (overlap.hidden_fraction, overlap.exposed, overlap.exchange)))
            found += [f"{name}: {overlap}"] * (measured != (line is None))
            found += [f"{name}: {overlap}"] * (line is not None and "not measured: " not in str(overlap))
        found += [f"{name}: {line} in {said}"] * (not any(line in one for one in said) if line else bool(said))
        found += [f"{name}: {metrics}"] * (isnan(metrics["hidden_fraction"]) != (line is not None))
        warned = [str(one.message) for one in told if "hidden_fraction is not measured" in str(one.message)]
        found += [f"{name}: {warned}"] * (warned != [f"hidden_fraction is not measured: {one}" for one in said])
        found += [f"{name}: {report['all']}"] * ((report["all"]["hidden_fraction"] is None) != (line is not None))
        found += [f"{name}: {report['verdict']}"] * (("Not measured" in report["verdict"]) != (line is not None))
        found += [f"{name}: {report['advice']}"] * (line is not None and report["advice"] != said)
        evaluated = engine.evaluate(data[0], target=data[1]).overlap
        found += [f"{name}: evaluation {evaluated}"] * (not evaluated.standing)
    return found


@pytest.mark.parametrize(("ranks", "experts"), [(2, False), (2, True), *wide((4, False))])
def test_what_stands_is_not_measured(kept: dict[int, Ranks], ranks: int, experts: bool) -> None:
    every = kept[ranks].run(problems_of, experts, timeout=100 * ranks)
    assert not any(every), "\n".join(line for lines in every for line in lines)


def _one_rank_has_some(rank: int, size: int) -> list[Any]:
    """Return the lines of each pipeline rank's result, of which the first alone holds a block that stands."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
    group = mesh.get_group("ep")
    torch.manual_seed(1)
    model = nn.Sequential(Block(uneven, group, False), Block(sized, group, False))
    program = build_schedule("1f1b", ranks=2, microbatches=3)
    data = batch(mesh.get_local_rank("ep"), microbatches=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = engine_of(model, mesh, program=program)
        return [engine.step(data[0], target=data[1]).overlap.standing for _ in range(3)][1:]


def test_all_ranks_say_it(ranks4: Ranks) -> None:
    """A figure over ranks has all of them or none; a rank that exchanges nothing where it stands has the line, too."""
    every = ranks4.run(_one_rank_has_some, timeout=100)
    assert all(len(lines) == 1 and "Undeclared" in lines[0] for steps in every for lines in steps), every
    assert len({lines for steps in every for lines in steps}) == 1
