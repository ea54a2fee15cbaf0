"""Processes that keep torchtitan imported, and what its own trainer gives on one of them."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.integrations.torchtitan.trainers import FAMILIES, own, train
from tests.ranks import Kept

Plain = Callable[..., dict[str, Any]]


@pytest.fixture(scope="package")
def titan() -> Iterator[Kept]:
    """Processes that keep torchtitan imported."""
    if torch.__version__ < "2.13":
        pytest.skip("torchtitan 0.3.0 needs torch 2.13")
    workers = Kept(timeout=240)
    yield workers
    workers.close()


@pytest.fixture(scope="package")
def folder(titan: Kept, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a checkpoint of the first weights of each family."""
    made = str(tmp_path_factory.mktemp("torchtitan"))
    titan[1].run(train, [{"folder": made, "family": family, "seed": True} for family in FAMILIES])
    return made


@pytest.fixture(scope="package")
def plain(titan: Kept, folder: str) -> Plain:
    """Returns what torchtitan's own trainer logs on the first of one rank or two."""
    known: dict[str, dict[str, Any]] = {}

    def result(ranks: int = 1, **case: Any) -> dict[str, Any]:
        given = own(folder, **case)
        if given["run"] not in known:
            known[given["run"]] = titan[ranks].run(train, [given])[0][0]
        return known[given["run"]]

    return result
