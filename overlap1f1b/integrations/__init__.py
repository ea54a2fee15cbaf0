"""Floor ``integrations``: other runtimes and models on the engine. Each subpackage is imported at its first use."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from overlap1f1b.transport.versions import check_torch

check_torch()

if TYPE_CHECKING:
    from overlap1f1b.integrations import dualpipe, megatron, rows, torch_pipelining, torchtitan, transformers

__all__ = ["dualpipe", "megatron", "rows", "torch_pipelining", "torchtitan", "transformers"]


def __getattr__(name: str) -> ModuleType:
    if name not in __all__:
        raise AttributeError(f"module 'overlap1f1b.integrations' has no attribute {name!r}")
    return importlib.import_module(f"overlap1f1b.integrations.{name}")


def __dir__() -> list[str]:
    return sorted(__all__)
