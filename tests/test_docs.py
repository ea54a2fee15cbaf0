"""README and docs: the first program runs, and every file and link that a page names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
ROOTS = (ROOT, ROOT / "overlap1f1b", ROOT / "benchmarks" / "results")
LINK = re.compile(r'\]\(([^)\s]+)\)|src="([^"]+)"')
FILE = re.compile(r"`([\w./-]+\.(?:py|md|json|svg|png)|[\w./-]+/)`")


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_files_exist(page: Path) -> None:
    text = page.read_text()
    for link, source in LINK.findall(text):
        target, _, anchor = (link or source).partition("#")
        if ":" in target:
            continue
        to = page.parent / target if target else page
        assert to.exists(), target
        assert not anchor or anchor in anchors(to), f"{target}#{anchor}"
    for name in FILE.findall(text):
        assert any((root / name).exists() for root in ROOTS), name


def test_the_first_program_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    program = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert program is not None
    exec(program[1], {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    assert all(re.fullmatch(r"loss \d\.\d{3}", line) for line in lines)
