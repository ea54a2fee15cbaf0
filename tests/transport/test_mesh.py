"""A mesh: coordinates, groups and labels whatever its order of ranks, and values compared over all ranks."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from overlap1f1b.schedule import build_schedule
from overlap1f1b.transport.mesh import Mesh, grid_of
from tests.ranks import Ranks

TURNED = [[3, 1], [2, 0]]  # ranks of a mesh that is not in ascending order


def _coordinates(rank: int, size: int) -> dict[str, Any]:
    mesh = Mesh(DeviceMesh("cpu", torch.tensor(TURNED), mesh_dim_names=("pp", "ep")))
    return {
        "at": (mesh.rank("pp"), mesh.rank("dp"), mesh.rank("ep")),
        "label": mesh.label,
        "ep": mesh.gathered("ep", rank),
        "pp": mesh.gathered("pp", rank),
        "dp": mesh.gathered("dp", rank),
        "ranks": (mesh.ranks(pp=[0], over=("ep",)), mesh.ranks(pp=[0, 1], over=())),
        "all": mesh.combined([rank], lambda _, parts: [one for part in parts for one in part]),
        "compared": (mesh.compared(1.0)(), mesh.compared(float(rank == 2))()),
    }


def test_coordinates_of_a_mesh_in_any_order(ranks4: Ranks) -> None:
    found = ranks4.run(_coordinates)
    for pp, row in enumerate(TURNED):
        for ep, rank in enumerate(row):
            mine = found[rank]
            column = [TURNED[0][ep], TURNED[1][ep]]
            assert mine["at"] == (pp, 0, ep)
            assert mine["label"] == f"rank pp {pp}, ep {ep}"
            assert (mine["ep"], mine["pp"], mine["dp"]) == (row, column, [rank])
            assert mine["ranks"] == ([1, 3], sorted(column))
            assert mine["all"] == [3, 1, 2, 0]
            assert mine["compared"] == ([False], [True])


def _shared_experts(rank: int, size: int) -> dict[str, Any]:
    device_mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("ep", "tp"))
    both, one = Mesh(device_mesh, experts_over=("tp", "ep")), Mesh(device_mesh)
    assert both.exchanging is not None
    assert one.exchanging is not None
    return {
        "slices": (both.expert_slice, one.expert_slice),
        "exchanging": (both.exchanging.size(), both.exchanging.rank(), one.exchanging.size()),
        "gathered": (both.gathered_by_experts(rank), one.gathered_by_experts(rank)),
        "copies": (both.expert_copies, one.expert_copies, both.data_ranks),
        "layout": both.layout,
        "leads": [
            mesh.leads([0], expert=expert, parts=parts)
            for mesh in (both, one)
            for expert in (False, True)
            for parts in ((), mesh.along("tp"))
        ],
    }


def test_a_tensor_group_may_share_the_experts(ranks4: Ranks) -> None:
    for rank, found in enumerate(ranks4.run(_shared_experts)):
        ep, tp = divmod(rank, 2)
        assert found["slices"] == ((rank, 4), (ep, 2))
        assert found["exchanging"] == (4, rank, 2)
        assert found["gathered"] == ([0, 1, 2, 3], [tp, 2 + tp])
        assert found["copies"] == (("dp", "cp"), ("dp", "cp"), 2)
        assert found["layout"] == {"pp": 1, "dp": 1, "ep": 2, "tp": 2}
        whole, own = [rank == 0, ep == 0], [tp == 0, True]  # a plain parameter, and one in parts over the tensor group
        assert found["leads"] == [*whole, True, True, *whole, *own]


def test_one_rank_is_a_mesh() -> None:
    mesh = Mesh(None)
    assert [mesh.size(dimension) for dimension in ("pp", "dp", "ep")] == [1, 1, 1]
    assert (mesh.label, mesh.several, mesh.group("ep"), mesh.on_gloo) == ("rank 0", False, None, False)
    assert mesh.gathered("ep", 7) == [7]
    assert mesh.compared(3.0)() == [False]
    with pytest.raises(ValueError, match=re.escape("over 2 pipeline ranks on a mesh with 1 along 'pp'")):
        mesh.check(build_schedule("1f1b", ranks=2, microbatches=2))


def _unlike_lengths(rank: int, size: int) -> str:
    long, short, across = (dist.new_group(ranks) for ranks in ([0, 1, 2], [3], [0, 3]))
    if rank in (1, 2):
        return ""
    with pytest.raises(ValueError, match="that share experts; allowed: a grid, one rank of each") as caught:
        grid_of(short if rank else long, across, torch.device("cpu"), timedelta(seconds=10))
    return str(caught.value)


def test_pipelines_of_unlike_lengths_are_no_grid(ranks4: Ranks) -> None:
    first, *_, last = ranks4.run(_unlike_lengths)
    assert first == last
    assert first.startswith("pipelines [[0, 1, 2], [3]] of ranks [0, 3] ")


def test_what_is_no_mesh_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^mesh of type list; allowed: a DeviceMesh, or None for one rank$"):
        Mesh([0, 1])  # type: ignore[arg-type]
