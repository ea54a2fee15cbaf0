"""Work on all ranks: results in the order of ranks, and one outcome where a rank fails."""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from overlap1f1b.transport.consensus import Together
from overlap1f1b.transport.failures import LostRankError
from overlap1f1b.transport.mesh import Mesh
from tests.ranks import over
from tests.transport.test_mesh import TURNED

VICTIM = 2
KINDS: list[type[BaseException]] = [ValueError, FileNotFoundError, KeyError, KeyboardInterrupt]


def _raised(call: Callable[[], Any]) -> tuple[type[BaseException], str]:
    try:
        call()
    except BaseException as error:
        return type(error), str(error)
    raise AssertionError("nothing was raised")


@over(4)
def test_an_error_of_one_rank_is_raised_on_all(rank: int, size: int) -> None:
    """And the results of the next call are in the order of ranks."""
    mesh = Mesh(DeviceMesh("cpu", torch.tensor(TURNED), mesh_dim_names=("pp", "ep")))
    together, where = Together(mesh, "it fails"), "it fails: rank pp 1, ep 0"

    def raising(kind: type[BaseException]) -> None:
        if rank == VICTIM:
            raise kind("a text")

    value, file, key, interrupt = (_raised(lambda kind=kind: together.each(lambda: raising(kind))) for kind in KINDS)
    assert value == (ValueError, "rank pp 1, ep 0: a text")
    assert file == (OSError, f"{where}: FileNotFoundError: a text")
    assert key[0] is RuntimeError
    assert key[1].startswith(f"{where}: KeyError")
    if rank == VICTIM:
        assert interrupt[0] is KeyboardInterrupt
    else:
        assert interrupt == (LostRankError, f"{where} was interrupted")
    assert together.each(lambda: rank * 10) == [0, 10, 20, 30]
    assert together.first(lambda: rank + 7) == 7
