"""The package as a checkout and as a wheel, and the floors of its tree."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import overlap1f1b

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "overlap1f1b"

# A floor imports itself and floors below it; kernels and schedule stand side by side on the ground.
LEVEL = {
    "kernels": 0,
    "terminal": 0,
    "schedule": 0,
    "plan": 1,
    "simulation": 2,
    "transport": 3,
    "moe": 4,
    "profiling": 5,
    # Above moe by lifetime: what lives long knows nothing of what lives short.
    "cut": 5,
    "reduce": 6,
    "play": 7,
    "learn": 8,
    "engine": 9,
    "checkpoint": 10,
    "record": 10,
    "integrations": 11,
    "running": 12,
    "cli": 13,
    "__main__": 14,
}
PURE = ("schedule", "plan", "simulation")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources that was never installed."""
    copy = tmp_path_factory.mktemp("checkout")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(PACKAGE, copy / "overlap1f1b", symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy)
    return copy


def test_kernels_are_importable_from_a_checkout(checkout: Path, tmp_path: Path) -> None:
    code = (
        "import importlib.util, overlap1f1b.kernels as k; print(k.__name__, k.__file__); "
        "print(importlib.util.find_spec('overlap1f1b.kernels.permute').origin)"
    )
    env = {**os.environ, "PYTHONPATH": str(checkout)}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    kernels = checkout / "overlap1f1b" / "kernels"
    assert result.stdout.splitlines() == [f"overlap1f1b.kernels {kernels / '__init__.py'}", str(kernels / "permute.py")]


def test_one_tree_of_kernels() -> None:
    """A link beside the package, which a checkout without links does not need."""
    assert (ROOT / "kernels").resolve() == PACKAGE / "kernels"


def test_wheel(checkout: Path, tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77", reason="builds a wheel with setuptools 77 or newer")
    source = tmp_path / "source"
    shutil.copytree(checkout, source, symlinks=True)
    build = [sys.executable, "-c", "from setuptools import build_meta; build_meta.build_wheel('wheels')"]
    result = subprocess.run(build, cwd=source, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    (wheel,) = (source / "wheels").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"overlap1f1b-{overlap1f1b.__version__}.dist-info/METADATA").decode()
    expected = {f"overlap1f1b/{path.relative_to(PACKAGE)}" for path in modules()}
    assert {name for name in names if name.endswith(".py")} == expected
    assert "overlap1f1b/py.typed" in names
    assert {name.split("/")[0] for name in names} == {"overlap1f1b", f"overlap1f1b-{overlap1f1b.__version__}.dist-info"}
    assert "Requires-Python: >=3.11" in metadata


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def floor_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports_of(path: Path) -> list[tuple[int, str]]:
    """Line and full name of everything that a module imports, wherever in it the import stands."""
    return list(imports(path, parsed(path)))


def imports(path: Path, tree: ast.AST) -> Iterator[tuple[int, str]]:
    package = ["overlap1f1b", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def imported_floor(name: str) -> str | None:
    """The floor that a full name belongs to, by way of the lazy names too; None for what stands outside."""
    root, _, rest = name.partition(".")
    if root != "overlap1f1b" or not rest:
        return None
    first = rest.split(".")[0]
    return overlap1f1b._HOME.get(first, first)


SOURCES = [path for path in modules() if path != PACKAGE / "__init__.py"]


def test_a_floor_imports_only_floors_below_and_a_pure_one_the_standard_library_alone() -> None:
    floors = {floor_of(path) for path in SOURCES}
    assert {"kernels", *PURE, "transport", "moe", "engine", "profiling", "cli"} <= floors <= set(LEVEL)
    for path in SOURCES:
        floor = floor_of(path)
        for line, name in imports_of(path):
            other = imported_floor(name)
            if floor in PURE:
                allowed = name.split(".")[0] in sys.stdlib_module_names or other in PURE
                assert allowed, f"{path}:{line} imports {name}"
            if other in (None, floor) or name == "overlap1f1b.__version__":
                continue
            assert other in LEVEL, f"{path}:{line} imports {name}, which stands on no floor"
            assert LEVEL[other] < LEVEL[floor], f"{path}:{line}: {floor} imports {name}, of a floor that is not below"


def test_no_modules_import_each_other_in_a_circle_for_type_checkers_neither() -> None:
    names_of = {path: ["overlap1f1b", *path.relative_to(PACKAGE).with_suffix("").parts] for path in SOURCES}
    files = {".".join(parts).removesuffix(".__init__"): path for path, parts in names_of.items()}
    ahead = {}
    for module, path in files.items():
        names = [name for _, name in imports_of(path)]
        found = {name if name in files else name.rpartition(".")[0] for name in names}
        ahead[module] = {name for name in found if name in files and name != module}
    try:
        tuple(TopologicalSorter(ahead).static_order())
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


# Objects live as long as their room says, and are set where they live.

MAKERS = ("__init__", "__new__", "__post_init__")
OF_LIBRARIES = {"__dict__", "_modules", "apply", "args", "dtype", "grad", "weight", "width"}
"""Names of attributes that objects of torch, transformers, Python and rich have, too."""


def attributes_set(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Owner and name of each attribute that a piece of code sets or deletes, in any statement."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            yield ast.unparse(node.value), node.attr


def methods(path: Path) -> Iterator[tuple[ast.ClassDef, ast.FunctionDef]]:
    for owner in ast.walk(parsed(path)):
        if isinstance(owner, ast.ClassDef):
            for member in owner.body:
                if isinstance(member, ast.FunctionDef) and "staticmethod" not in map(
                    ast.unparse, member.decorator_list
                ):
                    yield owner, member


def own_attributes(method: ast.FunctionDef) -> set[str]:
    return {name for owner, name in attributes_set(method) if owner == method.args.args[0].arg}


def test_what_is_cut_is_frozen_after_its_construction() -> None:
    found = {
        owner.name
        for path in SOURCES
        if floor_of(path) == "cut"
        for owner, method in methods(path)
        if method.name not in MAKERS and own_attributes(method)
    }
    assert not found


def test_no_room_sets_an_attribute_of_an_object_of_another() -> None:
    """An attribute is of the rooms whose classes have it; one that no class has is of a library."""
    rooms: dict[str, set[str]] = {name: set() for name in OF_LIBRARIES}
    for path in SOURCES:
        for node in ast.walk(parsed(path)):
            for name in fields_of(node) if isinstance(node, ast.ClassDef) else ():
                rooms.setdefault(name, set()).add(floor_of(path))
    for path in SOURCES:
        for owner, name in attributes_set(parsed(path)):
            if owner in ("self", "cls", "ctx") or name in OF_LIBRARIES:
                continue
            assert floor_of(path) in rooms.get(name, {floor_of(path)}), f"{path} sets {owner}.{name} of {rooms[name]}"


def fields_of(owner: ast.ClassDef) -> Iterator[str]:
    """Names in the body of a class, and those that its methods set."""
    for member in owner.body:
        if isinstance(member, ast.FunctionDef):
            yield member.name
            yield from own_attributes(member) if member.args.args else ()
        elif isinstance(member, ast.Assign | ast.AnnAssign):
            targets = member.targets if isinstance(member, ast.Assign) else [member.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


NO_NOUNS = {
    "again", "combined", "declared", "found", "free", "held", "plain", "predicted", "replaced", "simulate", "suspend",
    "tied", "timed", "together", "undo", "verify",
}  # fmt: skip
NOT_YET_NOUNS = {"undo"}


def test_a_file_is_named_by_a_noun() -> None:
    """No adverb, participle or verb; Megatron's interleaved schedule has its name from the paper."""
    stems = {path.stem for path in SOURCES} - {"interleaved", "feed"}
    verbal = {stem for stem in stems if stem in NO_NOUNS or stem.endswith(("ed", "ly"))}
    assert verbal <= NOT_YET_NOUNS


def test_integrations_import_what_the_page_for_them_names() -> None:
    """In full, as in `overlap1f1b.play.step.Step`, or in lines as of code."""
    page = ROOT / "docs" / "new-integration.md"
    if not page.exists():
        pytest.skip("docs/new-integration.md is not written")
    text = page.read_text()
    named = set(re.findall(r"\boverlap1f1b(?:\.\w+)+", text))
    for module, names in re.findall(r"from (overlap1f1b[\w.]*) import ([\w, ]+)", text):
        named |= {f"{module}.{name.strip()}" for name in names.split(",")}
    for path in SOURCES:
        for line, name in imports_of(path) if floor_of(path) == "integrations" else ():
            inside = imported_floor(name) not in (None, "integrations")
            assert not inside or name in named, f"{path}:{line} imports {name}, which {page.name} does not name"


TESTS = ROOT / "tests"
APART = {"", "campaign", "device", "nccl", "integrations/megatron/core"}
"""Folders of tests that are of no folder of the package: of the repository, of random trainings, of devices and of
Megatron-Core itself."""


COVERED_BY = {
    "cut/contents": "play/test_recompute",
    "play/random": "cut/test_random",
    "play/values": "cut/test_places",
    "__main__": "test_main", "cli/options": "cli/plan/test_command", "cli/plan/results": "cli/plan/test_command",
    "cli/report/figures": "cli/report/test_command",
    "cut/bits": "engine/test_agreement", "cut/blocks": "cut/test_stage", "cut/buffers": "cut/test_places",
    "cut/edges": "cut/test_weights", "cut/replacement": "play/test_block", "cut/uses": "play/test_block",
    "kernels/triton": "kernels/triton/test_launch", "learn/discovery": "cut/test_exchanges",
    "learn/loops": "engine/test_engine_numbers", "learn/pooling": "engine/test_engine_causes",
    "learn/peers": "learn/test_tuner", "learn/purpose": "learn/test_tuner", "learn/undo": "learn/test_check",
    "plan/budget": "plan/test_beam", "plan/justification": "plan/test_beam", "plan/precedence": "plan/test_beam",
    "play/install": "transport/test_suspension", "play/observers": "play/test_player", "play/times": "play/test_player",
    "reduce/links": "reduce/test_sums", "reduce/reduction": "reduce/test_sums",
    "running/bench": "running/bench/test_command",
    "running/options": "running/train/test_command", "running/sizes": "running/test_transformer",
    "terminal/arguments": "cli/test_main",
    "transport/budget": "transport/test_communicators", "transport/limits": "transport/test_failures",
}  # fmt: skip
"""Modules, or folders of them, without a file of tests of their own, and the one that is about them."""


def module_of(test: str, modules: set[str], folders: set[str]) -> str | None:
    """The module, or folder of modules, that a file of tests is of: test_MODULE.py, test_MODULE_PART.py, or any file in
    a folder of the module's name."""
    folder, _, name = test.rpartition("/")
    if folder in modules:
        return folder
    own = {module for module in modules | folders if module.rpartition("/")[0] == folder}
    fits = [module for module in own if f"{name}_".startswith(f"test_{module.rpartition('/')[2]}_")]
    return max(fits, key=len, default=None)


def test_tests_mirror_files() -> None:
    modules = {str(path.relative_to(PACKAGE).with_suffix("")) for path in SOURCES if path.name != "__init__.py"}
    folders = {str(path.parent.relative_to(PACKAGE)) for path in SOURCES} - {"."}
    tests = {str(path.relative_to(TESTS).with_suffix("")) for path in TESTS.rglob("test_*.py")}
    of = {test: module_of(test, modules, folders) for test in tests if test.rpartition("/")[0] not in APART}
    assert not [test for test, module in of.items() if module is None]
    covered = {*of.values(), *(module for module, test in COVERED_BY.items() if test in tests)}
    assert not [module for module in modules if not {module, module.rpartition("/")[0]} & covered]


KNOWS_CUDA = {
    "transport/devices.py": "the devices of the package",
    "profiling/reading.py": "names of events in traces",
    "running/launch.py": "options of nsys",
    "cli/doctor.py": "versions and variables of the environment",
    "integrations/megatron/config.py": "names of Megatron-Core",
}


def test_one_file_knows_the_devices_and_four_know_the_names_of_others() -> None:
    """Another kind of device is a change of the first file alone, and its name stands in no other."""
    named = {str(path.relative_to(PACKAGE)) for path in SOURCES if "cuda" in path.read_text().lower()}
    assert {path for path in named if not path.startswith("kernels/")} == set(KNOWS_CUDA)


def test_the_package_imports_its_floors_for_type_checkers_alone() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    guarded = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    tree.body = [node for node in tree.body if node not in guarded]
    assert not [name for _, name in imports(PACKAGE / "__init__.py", tree) if name.startswith("overlap1f1b")]
    assert len(guarded) == 1
