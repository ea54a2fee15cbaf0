"""MkDocs: the repository's root pages, and docstrings as they are written here, become a site without a second text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changes.md", "CONTRIBUTING.md": "contributing.md"}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the root."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text().replace("](docs/", "](").replace('src="docs/', 'src="')
        files.append(File.generated(config, page, content=_within(text)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Lead links to the root's pages to where they are in the site; of benchmarks it has the path alone."""
    return _within(markdown)


def _within(text: str) -> str:
    for source, page in PAGES.items():
        text = re.sub(rf"\]\((\.\./)?{re.escape(source)}", f"]({page}", text)
    return re.sub(r"\[([^]]+)\]\((?:\.\./)*(benchmarks/[^)]+)\)", r"\1 (`\2`)", text)  # not in the site


class Docstrings(griffe.Extension):
    """Makes Markdown of what docstrings write for Python: roles such as ``:class:``, and examples."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite an object's docstring."""
        if obj.docstring is not None:
            text = re.sub(r":\w+:`~?([^`]+)`", lambda role: f"`{role[1].rpartition('.')[2]}`", obj.docstring.value)
            example = re.compile(r"(?:^|(?<=\n\n))((?:>>> .*)(?:\n\S.*|\n    .*)*)", re.MULTILINE)
            obj.docstring.value = example.sub(r"```python\n\1\n```", text)
