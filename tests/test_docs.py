"""README and docs: their programs run, and every file and link that a page names exists."""

import ast
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import overlap1f1b as o1
from overlap1f1b.integrations.megatron.config import REFUSED
from overlap1f1b.integrations.transformers.arguments import REFUSED as OF_TRAINER
from overlap1f1b.moe import Experts
from tests.ranks import over

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
LOGS = [page for page in sorted((ROOT / "benchmarks").rglob("*.md")) if not page.name.startswith("nvidia-")]
PAGES = [README, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
ROOTS = (ROOT, ROOT / "overlap1f1b", ROOT / "benchmarks", ROOT / "benchmarks" / "results")
LINK = re.compile(r'\]\(([^)\s]+)\)|src="([^"]+)"')
FILE = re.compile(r"`([\w./-]+\.(?:py|md|json|svg|png|ipynb|sh|Dockerfile)|[\w./-]+/)`")


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def sentences(page: str) -> list[str]:
    """Return a page's sentences, without code, tables and headings; an item of a list is a paragraph."""
    page = re.sub(r"^ *```.*?^ *```$|^(?: {4}|\||#|!|<|:::).*?$", "\n", page, flags=re.MULTILINE | re.DOTALL)
    page = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]+`", "code", page))
    paragraphs = re.split(r"\n\s*\n|^ *(?:[-*>]|\d+\.) ", page, flags=re.MULTILINE)
    return [sentence for text in paragraphs for sentence in re.split(r"(?<=[.!?])[)\"*]*\s+", " ".join(text.split()))]


def test_sentences_are_found() -> None:
    page = (
        "# A title\n\nOne `a. b` [two](x.md). (Four five.) Six\n\n- seven\n- eight\n```\na. b\n```\n    code\n| a |\n"
    )
    assert list(filter(None, sentences(page))) == ["One code [two].", "(Four five.", "Six", "seven", "eight"]


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "benchmarks" / "README.md"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_a_page_is_short_and_so_are_its_sentences(page: Path) -> None:
    """At most 10 KB, and 30 words."""
    assert page.stat().st_size <= 10 * 1024
    long = [text for text in sentences(page.read_text()) if len(re.findall(r"\S*\w\S*", text)) > 30]
    assert long == []


@pytest.mark.parametrize("page", [*PAGES, *LOGS], ids=lambda page: str(page.relative_to(ROOT)))
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


def test_the_site_leads_to_every_page() -> None:
    _, nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:")
    pages = sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md"))
    made = ("index.md", "changes.md", "contributing.md")  # of the root's pages, by scripts/site.py
    assert sorted(name for name in re.findall(r"[\w./-]+\.md", nav) if name not in made) == pages


def test_the_reference_has_all_public_names() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "api").iterdir())
    there = {line.rpartition(".")[2] for line in pages.splitlines() if line.startswith("::: ")}
    assert set(o1.__all__) <= there


def test_the_first_program_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    program = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    exec(program[1], {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 20
    assert all(re.fullmatch(r"loss \d\.\d{3}", line) for line in lines)
    assert float(lines[-1][5:]) < 1 < float(lines[0][5:])


def test_the_experts_of_the_training_page_run() -> None:
    given: dict[str, Any] = {"torch": torch, "nn": nn, "Tensor": Tensor, "Sequence": Sequence, "Experts": Experts}
    page = (ROOT / "docs" / "training.md").read_text()
    exec(
        next(program for program in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "(Experts)" in program),
        given,
    )
    experts = given["MyExperts"](4, 8, None)
    tokens = torch.randn(5, 8)
    found = experts(tokens, torch.full((5, 1), 2), torch.ones(5, 1))
    assert torch.allclose(found, tokens @ experts.weight[2].T)


@over(2)
def test_the_page_of_a_new_dispatcher_runs(rank: int, size: int) -> None:
    """Its engine plays the nodes of an exchange, and for both replacements gradients are a plain loop's."""
    page: dict[str, Any] = {}
    for program in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "new-dispatcher.md").read_text(), re.DOTALL):
        exec(program, page)
    engine, model, x, target = (page[name] for name in ("engine", "model", "x", "target"))

    def gradients() -> list[Any]:
        found = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        return found

    def engine_of(program: Any) -> Any:
        return page["o1"].Engine(model, program, mesh=page["mesh"], loss_fn=engine.loss_fn)

    found = [gradients()]
    with page["replaced"](entry for layer in model for entry in page["by_library"](layer.dispatcher)):
        other = engine_of(engine.program)
        for _ in page["results"]:
            other.step(x, target=target)
        found.append(gradients())
    plain = engine_of(page["o1"].build_schedule("sequential", microbatches=4))
    for _ in page["results"]:
        plain.step(x, target=target)
    want = gradients()
    counts = [page["ops"].count(op) for op in ("dispatch.f", "combine.f", "combine.b", "dispatch.b")]
    assert counts == [2] * 4, counts
    assert [all(map(page["torch"].equal, one, want)) for one in found] == [True, True]


def test_the_lines_of_a_report_that_a_page_explains_are_those_of_the_program() -> None:
    """Sentences of a verdict and its advice, with any numbers."""
    tree = ast.parse((ROOT / "overlap1f1b" / "profiling" / "verdict.py").read_text())
    known = []
    for node in ast.walk(tree):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        texts = [re.escape(str(part.value)) if isinstance(part, ast.Constant) else ".+" for part in parts]
        texts = [text.replace(re.escape("{:.0%}"), ".+") for text in texts]
        if sum(len(text) for text in texts) > 40:
            known.append("".join(texts).removeprefix(".+").removeprefix("\\ "))
    page = (ROOT / "docs" / "not-faster.md").read_text()
    quoted = re.findall(r"^> (?:try: (.*)|((?:In part:|Yes:|Nothing was|The host bounds).*))$", page, re.MULTILINE)
    assert len(quoted) > 10
    for line in map("".join, quoted):
        assert any(re.fullmatch(pattern, line) for pattern in known), line


def test_the_pages_name_every_option_that_is_refused() -> None:
    of_megatron = [option for options in REFUSED.values() for option in options]
    refused = {"coming-from.md": of_megatron, "integrations/trainer-refused.md": OF_TRAINER}
    for page, options in refused.items():
        words = (ROOT / "docs" / page).read_text().replace("-", "_")
        assert [option for option in options if option not in words] == []
