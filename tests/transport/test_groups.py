"""Groups of one's own: their backend, their end, and what NCCL is told of them. NCCL itself is not here."""

import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b.schedule import build_schedule
from overlap1f1b.transport.exchange import PeerExchange
from overlap1f1b.transport.failures import LostRankError
from overlap1f1b.transport.groups import Groups, abort, backend_of, nccl_options, side_by_side
from tests import models
from tests.engines import make
from tests.ranks import Ranks, over, run
from tests.tiers import wide


def fake(**known: Any) -> Any:
    def options(is_high_priority_stream: bool = False) -> Any:
        return SimpleNamespace(is_high_priority_stream=is_high_priority_stream, config=SimpleNamespace(**known))

    policy = {"NCCL_CTA_POLICY_EFFICIENCY": 1} if "cta_policy" in known else {}
    return SimpleNamespace(Options=options, **policy)


def test_few_blocks_and_high_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older NCCL knows no policy."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", fake(min_ctas=0, max_ctas=0, cta_policy=0), raising=False)
    options = nccl_options(16)
    assert options.is_high_priority_stream
    assert vars(options.config) == {"min_ctas": 4, "max_ctas": 16, "cta_policy": 1}
    assert vars(nccl_options(2).config) == {"min_ctas": 2, "max_ctas": 2, "cta_policy": 1}
    monkeypatch.setattr(dist, "ProcessGroupNCCL", fake(min_ctas=0, max_ctas=0), raising=False)
    assert vars(nccl_options(None).config) == {"min_ctas": 0, "max_ctas": 0}


def _undefined(rank: int, size: int, folder: str, backend: str | None) -> list[str]:
    """What carries tensors of a CPU where no backend was named, or one for each device."""
    dist.destroy_process_group()
    dist.init_process_group(backend, init_method=f"file://{folder}/other", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    group, data = mesh.get_group("ep"), models.batch(2, seed=rank)
    model = models.build(group)
    engine = make(model, build_schedule("sequential", microbatches=2), mesh=mesh, timeout=20)
    engine.step(data[0], target=data[1])
    assert isinstance(engine.connection.exchange, PeerExchange)
    assert engine.connection.exchange.background  # as on gloo
    assert isinstance(next(m for m in model.modules() if hasattr(m, "exchange")).exchange, PeerExchange)
    return [dist.get_backend(), backend_of(None), backend_of(group)]


@pytest.mark.parametrize("backend", [None, *wide("cpu:gloo")])
def test_the_backend_is_that_of_the_device(tmp_path: Path, backend: str | None) -> None:
    for named, *found in run(_undefined, 2, str(tmp_path), backend):
        assert named != "gloo"  # of which torch says nothing useful
        assert found == ["gloo"] * 2


@over(2)
def test_a_backend_that_cannot_be_made_is_named(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match=r"for tensors on 'xpu'; allowed: on .*cpu"):
        backend_of(None, "xpu")
    groups = Groups([0, 1])
    groups.backend = "pigeons"
    with pytest.raises(ValueError, match="groups of backend 'pigeons' for 'cpu'; allowed: gloo, nccl, one"):
        groups.new([0, 1], "post")


def _aborted(rank: int, size: int, what: str) -> tuple[bool, str]:
    """A thread waits for something that never comes; ``abort`` here, or on the other rank, ends its wait."""
    group = Groups([0, 1], timedelta(seconds=30)).new([0, 1], what)
    said = []

    def wait() -> None:
        received = torch.zeros(2**22)
        work = {
            "receive": lambda: group.recv([received], 1 - rank, 3),
            "send": lambda: group.send([received], 1 - rank, 3),
            "collective": lambda: group.allreduce([received]) if rank == 0 else group.barrier(),
        }[what]()
        try:
            work.wait()
        except RuntimeError as error:
            said.append(str(error))

    thread = threading.Thread(target=wait, daemon=True)
    if rank == 0 or what == "receive":
        thread.start()
        thread.join(0.2)
    waited = thread.is_alive()
    dist.barrier()
    if rank == 1:
        abort(group)
    elif thread.ident:
        thread.join(10)
    dist.barrier()
    return waited, "".join(said)


@pytest.mark.parametrize("what", ["receive", *wide("send", "collective")])
def test_abort_ends_waits_here_and_there(ranks2: Ranks, what: str) -> None:
    (waited, said), _ = ranks2.run(_aborted, what)
    assert waited
    assert "Connection closed by peer" in said or "reset" in said or "pair closure" in said


@over(2)
def test_ranks_agree_on_names_without_a_message(rank: int, size: int) -> None:
    names: list[Any] = [None] * size
    dist.all_gather_object(names, [Groups(ranks).name for ranks in ([0, 1], [1, 0], [rank])])
    first, second = names
    assert first[:2] == second[:2]
    assert first[0] != first[1]
    assert first[2] != second[2]


@over(2)
def test_groups_of_another_backend_are_wrapped_and_not_registered(rank: int, size: int) -> None:
    """A backend that is registered with torch, whose object is wrapped as NCCL's is."""

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        made = dist.ProcessGroupGloo(store, rank, size, timeout)
        made._set_default_timeout(timeout)
        return made

    dist.Backend.register_backend("plugged", create, devices=["cpu"])
    groups = Groups([0, 1], timedelta(seconds=20))
    groups.backend = "plugged"
    before = len(dist.distributed_c10d._world.pg_map)
    both, link = groups.new([0, 1], "both"), groups.new([0, 1], "from 1 to 0", sends=rank == 1)
    groups.warm_up(torch.device("cpu"))
    got, sent, summed = torch.empty(2), torch.tensor([1.0, 2.0]) + 10 * rank, torch.tensor([1.0 + rank])
    dist.all_to_all_single(got, sent, group=both)
    dist.all_reduce(summed, group=both)
    passed = torch.tensor([7.0 * rank])
    (link.send if rank else link.recv)([passed], 1 - rank, 0).wait()
    assert len(dist.distributed_c10d._world.pg_map) == before  # torch keeps none of them
    groups.close()
    assert (got.tolist(), summed.tolist(), passed.tolist()) == ([1.0 + rank, 11.0 + rank], [3.0], [7.0])


@over(2)
def test_a_rank_that_does_not_come_is_told(rank: int, size: int) -> None:
    groups = Groups([0, 1], timedelta(seconds=0.2))
    if rank == 0:
        with pytest.raises(LostRankError, match=r"^ranks \[0, 1\] did not meet in group 'post': "):
            groups.new([0, 1], "post")


def test_groups_are_aborted_side_by_side() -> None:
    """The abort of one ends only when another has begun; one that fails hides nothing."""
    begun = threading.Barrier(2)
    ended: list[str] = []

    def end(name: str) -> None:
        begun.wait(5)
        ended.append(name)
        raise RuntimeError(name)

    side_by_side([lambda: end("rows"), lambda: end("link")])
    assert sorted(ended) == ["link", "rows"]
    side_by_side([])
