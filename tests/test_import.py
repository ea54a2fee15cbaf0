"""``import overlap1f1b`` is lazy, its names resolve, and the examples of the pure floors hold."""

import ast
import doctest
import importlib
import importlib.util
import json
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import overlap1f1b

ROOT = Path(__file__).parents[1]
PURE = ("schedule", "plan", "simulation")
DOCUMENTED = (*PURE, "profiling")
MODULES = [
    module.name
    for floor in DOCUMENTED
    for module in pkgutil.walk_packages([str(ROOT / "overlap1f1b" / floor)], f"overlap1f1b.{floor}.")
]


USES = """
import json, sys, overlap1f1b
print(json.dumps([name for name in sys.modules if name.startswith("overlap1f1b.")]))
print(json.dumps(sorted(set(overlap1f1b.__all__) - set(dir(overlap1f1b)))))
overlap1f1b.build_schedule("combined_1f1b", microbatches=4).check()
overlap1f1b.Plan, overlap1f1b.NodeCosts, overlap1f1b.compile, overlap1f1b.simulate, overlap1f1b.Timeline
from overlap1f1b import schedule, plan, simulation
heavy = ("torch", "numpy", "greenlet", "einops", "msgspec", "rich", "tyro")
print(json.dumps([name for name in heavy if name in sys.modules]))
"""


def test_the_package_loads_no_floor_and_lists_all_names_and_schedules_and_plans_load_without_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", USES], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    floors, not_listed, heavy = map(json.loads, done.stdout.splitlines())
    assert (floors, not_listed, heavy) == ([], [], [])


def test_benchmarks_and_examples_import_what_is_there() -> None:
    missing = [
        f"{path.name}: {node.module}.{alias.name}"
        for folder in ("benchmarks", "examples", "scripts")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("overlap1f1b")
        for alias in node.names
        if not hasattr(importlib.import_module(str(node.module)), alias.name)
        and importlib.util.find_spec(f"{node.module}.{alias.name}") is None
    ]
    assert missing == []


@pytest.mark.parametrize("name", overlap1f1b.__all__)
def test_every_name_resolves(name: str) -> None:
    assert getattr(overlap1f1b, name).__module__.startswith("overlap1f1b.")


def test_unknown_attribute() -> None:
    with pytest.raises(AttributeError, match=r"^module 'overlap1f1b' has no attribute 'nothing'$"):
        overlap1f1b.nothing  # noqa: B018
    with pytest.raises(ImportError, match="nothing"):
        exec("from overlap1f1b import nothing")


def test_the_version_stands_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "overlap1f1b.__version__"}
    assert overlap1f1b.__version__ in (ROOT / "CITATION.cff").read_text()


@pytest.mark.parametrize("floor", DOCUMENTED)
def test_floors_export_what_they_list(floor: str) -> None:
    module = importlib.import_module(f"overlap1f1b.{floor}")
    assert len(set(module.__all__)) == len(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)


def test_examples_in_docstrings() -> None:
    found = {name: doctest.testmod(importlib.import_module(name)) for name in MODULES}
    assert {name: results for name, results in found.items() if results.failed} == {}
    assert sum(results.attempted > 0 for results in found.values()) >= 10
