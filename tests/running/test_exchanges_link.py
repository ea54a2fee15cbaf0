"""The imitated link: the same rows as without it, not before their bytes would have come."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b.engine import Engine
from overlap1f1b.running.exchanges import PacedExchange
from overlap1f1b.running.options import DEFAULT_LINK, TrainOptions
from overlap1f1b.running.ranks import Rank
from overlap1f1b.running.train import link_of
from overlap1f1b.schedule import build_schedule
from overlap1f1b.transport.exchange import own_exchange
from tests import models
from tests.engines import COSTS, make
from tests.ranks import over

GBPS = 1e-5  # 10,000 bytes a second


@over(2)
def test_rows_come_when_their_bytes_would_have(rank: int, size: int) -> None:
    exchange, problems = PacedExchange(own_exchange(dist.group.WORLD), GBPS), list[str]()
    send, receive = ([1, 2], [1, 3]) if rank == 0 else ([3, 1], [2, 1])  # 3 rows travel one way, 2 the other
    source = torch.arange(sum(send) * 16.0).view(-1, 16) + 1000 * rank
    one, two = (exchange.rows(source, send, receive, tag) for tag in (1, 2))
    for transfer in (one, two):
        found = transfer.finish()
        if found.shape != (sum(receive), 16) or not torch.equal(found[0], source[0] if rank == 0 else found[0]):
            problems.append(f"other rows: {found}")
    first, second = one.mark, two.mark
    if first.ended - first.begun < 3 * 64 / 1e4 or second.ended - first.begun < 6 * 64 / 1e4:
        problems.append(f"too early: {first.begun} {first.ended} {second.ended}")
    assert not problems, problems


@over(2)
def test_gradients_are_those_without_it(rank: int, size: int) -> None:
    mesh, grads = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)), []
    inputs, target = models.batch(4, seed=rank)
    for paced in (False, True):
        group = mesh.get_group("ep")
        exchange = PacedExchange(own_exchange(group), 1e-2) if paced else None
        model, program = models.build(group), build_schedule("combined_1f1b", microbatches=4)
        engine: Engine = make(model, program, mesh=mesh, costs=COSTS, exchange=exchange, verify=False)
        for _ in range(2):
            result = engine.step(inputs, target=target)
        grads.append([p.grad for p in engine.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert result.overlap.exchange


@pytest.mark.parametrize(
    ("link", "group", "device", "rate"),
    [(None, True, "cpu", DEFAULT_LINK), (0.0, True, "cpu", 0), (2.5, True, "cpu", 2.5), (None, False, "cpu", 0)],
)
def test_the_rate(link: float | None, group: bool, device: str, rate: float, monkeypatch: Any) -> None:
    monkeypatch.setattr(Rank, "group", property(lambda self: object() if group else None))
    rank = Rank(0, 2, torch.device(device), None)
    assert link_of(TrainOptions(link=link), rank) == rate
    kept = TrainOptions(link=link, checkpoint=Path("kept"))  # a training for its own sake is not slowed down
    assert link_of(kept, rank) == (link or 0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # the other rank is on another machine
    assert link_of(TrainOptions(link=link), rank) == (link or 0)


def test_a_link_of_one_rank_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--link 2 on 1 rank, cpu; allowed: several ranks on CPUs"):
        link_of(TrainOptions(link=2.0), Rank(0, 1, torch.device("cpu"), None))
