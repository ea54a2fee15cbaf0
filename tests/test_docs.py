"""README and docs: the first program runs, names of files and links exist, pictures show what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r'\]\(([^)\s]+)\)|src="([^"]+)"')
FILE = re.compile(r"`([\w./{},-]+?\.(?:py|md|json|svg|png)|[\w./]+/)`")
PLACES = (".", "overlap1f1b", "benchmarks/results")
OF_USERS = re.compile(r"^(config|generation_config|bench|report|before|rank0)\b|^(kernels/triton|docs)/$|GPU-DATE")


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def id_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=id_of)
def test_links_lead_somewhere(page: Path) -> None:
    for found in LINK.findall(page.read_text()):
        target, _, anchor = (found[0] or found[1]).partition("#")
        if ":" in target:
            continue
        to = page.parent / target if target else page
        assert to.exists(), target
        assert not anchor or anchor in anchors(to), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=id_of)
def test_named_files_exist(page: Path) -> None:
    for name in FILE.findall(page.read_text()):
        assert any((ROOT / place / name).exists() for place in PLACES), name
