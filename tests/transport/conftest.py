"""Engines of this folder compile their plans with few tries, as those of :mod:`tests.engine`."""

from tests.engine.conftest import _few_tries  # noqa: F401
