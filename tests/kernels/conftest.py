"""Tests marked ``triton`` run in a process of their own, where Triton interprets; with a GPU they run as they are.

Triton reads ``TRITON_INTERPRET`` when it is imported, and other tests are not to run so.
"""

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.ranks import fork_server


@pytest.fixture(autouse=True, scope="session")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """The process; it starts with the first test that needs it."""
    pool = ProcessPoolExecutor(1, fork_server(), _begin)
    yield pool
    for process in list((pool._processes or {}).values()):  # it may still run a test that took too long
        process.kill()


def _begin() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton" and "._C" not in name]:
        del sys.modules[name]  # the server has imported it with torch
    torch.set_num_threads(1)


def _call(module: str, name: str, arguments: dict[str, Any]) -> None:
    torch.manual_seed(0)
    getattr(import_module(module), name)(**arguments)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if pyfuncitem.get_closest_marker("triton") is None:
        return None
    if find_spec("triton") is None:
        pytest.skip("needs the package triton")
    if torch.cuda.is_available():
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    place = pyfuncitem.module.__name__, pyfuncitem.originalname
    pyfuncitem.funcargs["interpreter"].submit(_call, *place, arguments).result()
    return True
