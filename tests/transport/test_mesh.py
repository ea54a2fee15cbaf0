"""A mesh: coordinates, groups and labels whatever its order of ranks, and values compared over all ranks."""

import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from overlap1f1b.schedule import build_schedule
from overlap1f1b.transport.mesh import Mesh, check_ranks, grid_of
from tests.ranks import Ranks, over

TURNED = [[3, 1], [2, 0]]  # ranks of a mesh that is not in ascending order


@over(4)
def test_coordinates_of_a_mesh_in_any_order(rank: int, size: int) -> None:
    mesh = Mesh(DeviceMesh("cpu", torch.tensor(TURNED), mesh_dim_names=("pp", "ep")))
    pp, ep = next((pp, row.index(rank)) for pp, row in enumerate(TURNED) if rank in row)
    column = [TURNED[0][ep], TURNED[1][ep]]
    assert (mesh.rank("pp"), mesh.rank("dp"), mesh.rank("ep")) == (pp, 0, ep)
    assert mesh.label == f"rank pp {pp}, ep {ep}"
    assert [mesh.gathered(name, rank) for name in ("ep", "pp", "dp")] == [TURNED[pp], column, [rank]]
    assert (mesh.ranks(pp=[0], over=("ep",)), mesh.ranks(pp=[0, 1], over=())) == ([1, 3], sorted(column))
    assert mesh.combined([rank], lambda _, parts: [one for part in parts for one in part]) == [3, 1, 2, 0]
    assert mesh.compared({"call": 1.0, "scale": float(rank == 2)}).differ() == {"scale"}


@over(4)
def test_a_tensor_group_may_share_the_experts(rank: int, size: int) -> None:
    device_mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("ep", "tp"))
    both, one = Mesh(device_mesh, experts_over=("tp", "ep")), Mesh(device_mesh)
    ep, tp = divmod(rank, 2)
    assert (both.expert_slice, one.expert_slice) == ((rank, 4), (ep, 2))
    assert (both.exchanging.size(), both.exchanging.rank(), one.exchanging.size()) == (4, rank, 2)
    shared = [[*mesh.every(str(rank), over=mesh.experts_over).items()] for mesh in (both, one)]
    assert shared == [[(at, str(at)) for at in ranks] for ranks in ([0, 1, 2, 3], [tp, 2 + tp])]
    assert (both.expert_copies, one.expert_copies, both.data_ranks) == (("dp", "cp"), ("dp", "cp"), 2)
    assert both.layout == {"pp": 1, "dp": 1, "ep": 2, "tp": 2}
    whole, own = [rank == 0, ep == 0], [tp == 0, True]  # a plain parameter, and one in parts over the tensor group
    assert [
        mesh.leads([0], expert=expert, parts=parts)
        for mesh in (both, one)
        for expert in (False, True)
        for parts in ((), mesh.along("tp"))
    ] == [*whole, True, True, *whole, *own]


def test_one_rank_is_a_mesh() -> None:
    mesh = Mesh(None)
    assert [mesh.size(dimension) for dimension in ("pp", "dp", "ep")] == [1, 1, 1]
    assert (mesh.label, mesh.several, mesh.group("ep"), mesh.on_gloo) == ("rank 0", False, None, False)
    assert mesh.gathered("ep", 7) == [7]
    assert mesh.compared({"call": 3.0}).differ() == set()
    with pytest.raises(ValueError, match=re.escape("over 2 pipeline ranks on a mesh with 1 along 'pp'")):
        check_ranks(build_schedule("1f1b", ranks=2, microbatches=2), mesh.devices)


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
    with pytest.raises(ValueError, match=r"^mesh=\[0, 1\]; allowed: DeviceMesh or None$"):
        Mesh([0, 1])  # type: ignore[arg-type]
