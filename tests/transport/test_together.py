"""Work on all ranks: results in the order of ranks, and one outcome where a rank fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from overlap1f1b.transport.failures import LostRankError
from overlap1f1b.transport.mesh import Mesh
from overlap1f1b.transport.together import Together
from tests.ranks import Ranks

TURNED = [[3, 1], [2, 0]]  # ranks of a mesh that is not in ascending order
VICTIM = 2


def _mesh() -> Mesh:
    return Mesh(DeviceMesh("cpu", torch.tensor(TURNED), mesh_dim_names=("pp", "ep")))


def _results(rank: int, size: int) -> tuple[list[int], int]:
    together = Together(_mesh(), "it fails")
    return together.each(lambda: rank * 10), together.first(lambda: rank + 7)


def test_results_are_in_the_order_of_ranks(ranks4: Ranks) -> None:
    assert ranks4.run(_results) == [([0, 10, 20, 30], 7)] * 4


def _raised(call: Callable[[], Any]) -> tuple[type[BaseException], str]:
    try:
        call()
    except BaseException as error:
        return type(error), str(error)
    raise AssertionError("nothing was raised")


def _errors(rank: int, size: int, kinds: list[type[BaseException]]) -> list[tuple[type[BaseException], str]]:
    together = Together(_mesh(), "it fails")

    def raising(kind: type[BaseException]) -> None:
        if rank == VICTIM:
            raise kind("a text")

    found = [_raised(lambda kind=kind: together.each(lambda: raising(kind))) for kind in kinds]
    return found if together.each(lambda: rank) == list(range(size)) else []


def test_an_error_of_one_rank_is_raised_on_all(ranks4: Ranks) -> None:
    where = "it fails: rank pp 1, ep 0"
    for rank, found in enumerate(ranks4.run(_errors, [ValueError, FileNotFoundError, KeyError, KeyboardInterrupt])):
        value, file, key, interrupt = found
        assert value == (ValueError, "rank pp 1, ep 0: a text")
        assert file[0] is OSError
        assert file[1] == f"{where}: FileNotFoundError: a text"
        assert key[0] is RuntimeError
        assert key[1].startswith(f"{where}: KeyError")
        if rank == VICTIM:
            assert interrupt[0] is KeyboardInterrupt
        else:
            assert interrupt == (LostRankError, f"{where} was interrupted")
