"""Tests marked ``triton`` run in a process of their own, where Triton interprets; with a GPU they run as they are.

Triton reads ``TRITON_INTERPRET`` when it is imported, and other tests are not to run so.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch


class Interpreter:
    """The process; it starts with the first test that needs it."""

    def __init__(self) -> None:
        self._process: Any = None
        self._pipe: Any = None

    def run(self, module: str, name: str, arguments: dict[str, Any]) -> None:
        """Calls a function by its name, and fails as it does."""
        if self._process is None:
            self._start()
        try:
            self._pipe.send((module, name, arguments))
            error = self._pipe.recv()
        except (EOFError, BrokenPipeError):
            self._process.join(5)
            error = f"the interpreter died, exit code {self._process.exitcode}"
            self.close()
        except BaseException:  # a time limit: the answer would be the next call's
            self.close()
            raise
        if error is not None:
            pytest.fail(error, pytrace=False)

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        before = os.environ.get("TRITON_INTERPRET")
        os.environ["TRITON_INTERPRET"] = "1"
        try:
            self._process.start()
        finally:
            del os.environ["TRITON_INTERPRET"]
            if before is not None:
                os.environ["TRITON_INTERPRET"] = before
        theirs.close()

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
        self._process = None


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            module, name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            getattr(import_module(module), name)(**arguments)
            pipe.send(None)
        except BaseException:
            pipe.send(traceback.format_exc())


@pytest.fixture(autouse=True, scope="session")
def interpreter() -> Iterator[Interpreter]:
    process = Interpreter()
    yield process
    process.close()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if pyfuncitem.get_closest_marker("triton") is None:
        return None
    if find_spec("triton") is None:
        pytest.skip("needs the package triton")
    if torch.cuda.is_available():
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    pyfuncitem.funcargs["interpreter"].run(pyfuncitem.module.__name__, pyfuncitem.originalname, arguments)
    return True
