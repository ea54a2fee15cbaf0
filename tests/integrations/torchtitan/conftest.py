"""Processes that keep torchtitan imported, and what its own trainer gives on one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.integrations.torchtitan.trainers import FAMILIES, own, train
from tests.ranks import Ranks

Plain = Callable[..., dict[str, Any]]


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
def plain(titan1: Ranks, titan2: Ranks, folder: str) -> Plain:
    """Returns what torchtitan's own trainer logs on the first of one rank or two."""
    known: dict[str, dict[str, Any]] = {}

    def result(ranks: int = 1, **case: Any) -> dict[str, Any]:
        given = own(folder, **case)
        if given["run"] not in known:
            known[given["run"]] = (titan1 if ranks == 1 else titan2).run(train, [given])[0][0]
        return known[given["run"]]

    return result
