"""Commands that last, without a terminal."""

import sys
import threading
from functools import reduce
from importlib import import_module
from typing import Any

import pytest

from overlap1f1b.cli.main import main
from overlap1f1b.terminal.output import _Lines


def lasting(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    """Calls of `target`, "module:name", last until a line about what is done and left was printed."""
    module, _, path = target.partition(":")
    *outer, name = path.split(".")
    holder = reduce(getattr, outer, import_module(module))
    printed, print_line, called = threading.Event(), _Lines._print, getattr(holder, name)

    def noted(self: _Lines, text: str) -> None:
        print_line(self, text)
        printed.set()

    def waiting(*args: Any, **kwargs: Any) -> Any:
        for _ in range(2):  # the first may have begun before
            printed.clear()
            assert printed.wait(10), f"no line while {target} runs"
        return called(*args, **kwargs)

    monkeypatch.setattr("overlap1f1b.terminal.output.EVERY_S", 0.01)
    monkeypatch.setattr(_Lines, "_print", noted)
    monkeypatch.setattr(holder, name, waiting)


if __name__ == "__main__":  # TARGET VERB …: the verb in a process of its own
    with pytest.MonkeyPatch.context() as patch:
        lasting(patch, sys.argv[1])
        sys.exit(main(sys.argv[2:]))
