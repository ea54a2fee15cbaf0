"""Processes that keep torchtitan imported, and what its own trainer gives on one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.integrations.torchtitan.trainers import FAMILIES, MICRO, SEQUENCES, train
from tests.ranks import Ranks

Plain = Callable[..., dict[str, Any]]
Own = Callable[..., list[dict[str, Any]]]


def _kept(size: int) -> Iterator[Ranks]:
    if torch.__version__ < "2.13":
        pytest.skip("torchtitan 0.3.0 needs torch 2.13")
    workers = Ranks(size, timeout=240)
    yield workers
    workers.close()


@pytest.fixture(scope="package")
def titan1() -> Iterator[Ranks]:
    yield from _kept(1)


@pytest.fixture(scope="package")
def titan2() -> Iterator[Ranks]:
    yield from _kept(2)


@pytest.fixture(scope="package")
def titan4() -> Iterator[Ranks]:
    yield from _kept(4)


@pytest.fixture(scope="package")
def folder(titan1: Ranks, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a checkpoint of the first weights of each family."""
    made = str(tmp_path_factory.mktemp("torchtitan"))
    titan1.run(train, [{"folder": made, "family": family, "seed": True} for family in FAMILIES])
    return made


@pytest.fixture(scope="package")
def plain(titan1: Ranks, folder: str) -> Plain:
    """Returns what torchtitan's own trainer logs on one rank, a microbatch after the other."""
    known: dict[str, dict[str, Any]] = {}

    def result(**case: Any) -> dict[str, Any]:
        name = "plain " + " ".join(f"{key}={case[key]}" for key in sorted(case))
        if name not in known:
            micro = case.get("micro", MICRO)
            given = {"folder": folder, "run": name, "batch": micro, "total": SEQUENCES, **case}
            known[name] = titan1.run(train, [given])[0][0] | {"run": name}
        return known[name]

    return result


@pytest.fixture(scope="package")
def own(titan2: Ranks, folder: str) -> Own:
    """Returns what torchtitan's own trainer logs on each of two ranks, and the name of the run."""
    known: dict[str, list[dict[str, Any]]] = {}

    def result(**case: Any) -> list[dict[str, Any]]:
        name = "own " + " ".join(f"{key}={case[key]}" for key in sorted(case))
        if name not in known:
            given = [{"folder": folder, "run": name, "batch": case.get("micro", MICRO), "total": SEQUENCES, **case}]
            known[name] = [logged | {"run": name} for (logged,) in titan2.run(train, given)]
        return known[name]

    return result
