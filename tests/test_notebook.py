"""The notebook runs, and what it stores is what it prints."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

NOTEBOOK = Path(__file__).parents[1] / "examples" / "first_steps.ipynb"
LIMIT_S = 240


def texts(notebook: Any) -> list[str]:
    """What each cell of code has printed to stdout; outputs that are no text are refused."""
    found = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert {output.output_type for output in cell.outputs} <= {"stream"}
            found.append("".join(output.text for output in cell.outputs if output.name == "stdout"))
    return found


@pytest.mark.wide
@pytest.mark.timeout(LIMIT_S + 60)
def test_the_notebook_prints_what_it_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(NOTEBOOK.parents[1]), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    stored = texts(notebook)
    options = {"timeout": LIMIT_S, "kernel_name": "python3", "resources": {"metadata": {"path": str(tmp_path)}}}
    nbclient.NotebookClient(notebook, **options).execute()
    for before, now in zip(stored, texts(notebook), strict=True):
        if "order:" not in before:  # all but times and what was hidden in them
            assert now == before
            continue
        line = re.compile(r"^step (\d+) loss (\d\.\d+), \d+% of the exchange hidden$", re.MULTILINE)
        steps = [line.findall(text) for text in (before, now)]
        assert [step for step, _ in steps[0]] == [step for step, _ in steps[1]] == ["4", "9", "14", "19"]
        assert float(steps[1][-1][1]) < float(steps[1][0][1]) / 10
        assert "order: combined_1f1b" in now
