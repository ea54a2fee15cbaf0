"""The parser of the command line: tyro fills dataclasses of options, and its errors become one line.

A field says what it takes: ``Annotated[int | None, by_default("INT", 4), Range(1)]``.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from math import inf, isfinite
from typing import Annotated, Any, TypeVar, get_type_hints

import docstring_parser
import tyro

T = TypeVar("T")

_MESSAGES: dict[str, str | Callable[[re.Match[str]], str]] = {
    r"Unrecognized options: (.*)": lambda found: (
        ("unknown option: " if found[1].startswith("-") else "unexpected: ") + found[1].replace(", ", " ")
    ),
    r"Error parsing (\S+): no type matching (.+) could be instantiated from \[(.*)\]": r"\1 \3; allowed: \2",
    r"Error parsing (\S+): invalid literal for int\(\) with base 10: (.*)": r"\1 \2; allowed: INT",
    r"Error parsing (\S+): could not convert string to float: (.*)": r"\1 \2; allowed: FLOAT",
    r"invalid choice (.*) for argument '(.*)'\. Expected one of \((.*)\)": r"\2 \1; allowed: \3",
    r"Missing value for argument '(.*)'\. Expected (\d+) values": r"\1 without a value; allowed: \2 after it",
    r"allowed: (?:INT\|)?\{([\w,]+)\}(?:\|INT)?$": r"allowed: a whole number, or \1",
    r"allowed: INT$": "allowed: a whole number",
    r"allowed: \{((?:[A-Z]+ ?)+)\}$": r"allowed: \1",
    r"allowed: FLOAT$": "allowed: a number",
}
"""Patterns of tyro's messages, and the same in the words of this project's errors; applied in this order."""


def by_default(metavar: str | None = None, default: object = "none") -> Any:
    """Return the help note of an option that is None unless it is given: its value and its default in ``--help``."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})")


def texts_in_a_line(options: type[T]) -> type[T]:
    """Let ``--help`` wrap the docstrings behind a dataclass's fields once: tyro 1.0 keeps the line breaks of these."""
    hints = get_type_hints(options, include_extras=True)
    for text in docstring_parser.parse_from_object(options).params:
        if text.arg_name in options.__annotations__:
            words = " ".join((text.description or "").split())
            options.__annotations__[text.arg_name] = Annotated[hints[text.arg_name], tyro.conf.arg(help=words)]
    return options


@dataclass(frozen=True)
class Range:
    """Finite numbers from ``least`` (with ``above`` it is not one of them) to ``most``: what an option may be."""

    least: float = 0
    most: float = inf
    above: bool = False

    def __contains__(self, value: float) -> bool:
        return (self.least < value if self.above else self.least <= value) and value <= self.most and value != inf

    def __str__(self) -> str:
        first = f"more than {self.least}" if self.above else f"{self.least} or more"
        return first if self.most == inf else f"{first}, at most {self.most}"


ABOVE_0 = Range(above=True)


def check_ranges(options: Any) -> None:
    """Raise ``ValueError`` for a number outside the range of its field; groups of options inside are checked, too."""
    for name, hint in get_type_hints(type(options), include_extras=True).items():
        value = getattr(options, name)
        if is_dataclass(value):
            check_ranges(value)
        for allowed in getattr(hint, "__metadata__", ()):
            if isinstance(allowed, Range) and isinstance(value, int | float) and value not in allowed:
                text = format(value, "g" if isinstance(value, float) else "")
                finite = ", finite" if allowed.most == inf and not isfinite(value) else ""
                raise ValueError(f"--{name.replace('_', '-')} {text}; allowed: {allowed}{finite}")


def parse(argv: Sequence[str], verbs: Mapping[str, type], *, prog: str, description: str) -> Any:
    """Return the options of the verb that comes first, by ``verbs``; ``--help`` is printed and ends the process."""
    first = argv[0]
    if first in ("-h", "--help"):
        sys.stdout.write(_overview(verbs, prog, description))
        raise SystemExit(0)
    if first not in verbs and not first.startswith("--tyro-"):
        raise ValueError(f"unknown verb {first!r}; allowed: {', '.join(verbs)}, --help")
    if first in verbs:
        _check_names(argv[1:], verbs[first])
    said = io.StringIO()
    options: Any
    try:
        with contextlib.redirect_stderr(said):
            if first in verbs:  # alone, so that no option of another verb is suggested
                options = tyro.cli(verbs[first], args=argv[1:], prog=f"{prog} {first}")
            else:  # completion of a shell
                options = tyro.extras.subcommand_cli_from_dict(
                    dict(verbs), args=argv, prog=prog, sort_subcommands=False
                )
    except SystemExit as error:
        if not error.code or first not in verbs:
            sys.stderr.write(said.getvalue())
            raise
        raise ValueError(f"{_in_order(_one_line(said.getvalue()), verbs[first])}; see {prog} {first} --help") from None
    sys.stderr.write(said.getvalue())
    return options


def _check_names(words: Sequence[str], options: type) -> None:
    """Raise ``ValueError`` for an option by two names, an empty value, and a list that is given twice.

    The parser would keep the last in silence. One option, repeated with another value, replaces the first as usual.
    """
    hints = get_type_hints(options, include_extras=True)
    aliases = {
        alias: f"--{name.replace('_', '-')}"
        for name, hint in hints.items()
        for of in getattr(hint, "__metadata__", ())
        for alias in getattr(of, "aliases", None) or ()
    }
    lists = {f"--{name.replace('_', '-')}" for name, hint in hints.items() if "tuple[" in str(hint)}
    seen: dict[str, str] = {}
    for word, follows in zip(words, [*words, "--"][1:], strict=True):
        if (word.startswith("--") and follows == "") or word.endswith("="):
            raise ValueError(f"{word.rstrip('=')} with an empty value; allowed: one that says something")
        if word in lists and follows.startswith("--"):
            raise ValueError(f"{word} without a value; allowed: one or more after it")
    for word in (one.partition("=")[0].replace("_", "-") for one in words if one.startswith("--")):
        name = aliases.get(word, word.replace("--no-", "--", 1))
        if seen.get(name, word) != word:
            raise ValueError(f"{seen[name]} with {word}, the same option; allowed: one of them")
        if name in seen and name in lists:
            raise ValueError(f"{word} twice; allowed: once, with all its values behind it")
        seen[name] = word


def _in_order(text: str, options: type) -> str:
    """Return an error with its choices as in the help: in the order of their declaration, without None."""
    found = re.fullmatch(r"--([\w-]+) (.*; allowed: )('.*')", text)
    if found is None:
        return text
    declared = str(get_type_hints(options, include_extras=True).get(found[1].replace("-", "_")))
    choices = [choice for choice in found[3].split(", ") if choice != "'None'"]
    return f"--{found[1]} {found[2]}{', '.join(sorted(choices, key=declared.find))}"


def _overview(verbs: Mapping[str, type], prog: str, description: str) -> str:
    width = max(map(len, verbs))
    does = [f"  {verb:{width}}  {(kind.__doc__ or '').splitlines()[0]}" for verb, kind in verbs.items()]
    return "\n".join(
        [f"usage: {prog} {{{','.join(verbs)}}} [options]", "", description.strip(), "", *does, "",
         f"{prog} VERB --help shows a verb's options and examples.", ""]
    )  # fmt: skip


def _one_line(box: str) -> str:
    """Return the first sentence of tyro's box, drawn in Unicode or ASCII, and the names of similar options."""
    lines = [line.strip("│ ") for line in box.strip().splitlines() if not line.startswith(("╭", "╰"))]
    paragraphs = re.split(r"\n[─-]+\n", "\n".join(lines))
    if not box.startswith("╭") and len(paragraphs) > 1:
        del paragraphs[0]  # drawn without box characters, the title is a paragraph
    paragraph, *others = paragraphs
    sentence = " ".join(paragraph.split("\n\n", 1)[0].split()).rstrip(".").replace("{None}|", "")
    for pattern, words in _MESSAGES.items():
        sentence = re.sub(pattern, words, sentence)
    similar = [text for text in others if text.startswith("Perhaps you meant")]
    found = dict.fromkeys(name for text in similar for name in re.findall(r"^--[\w-]+", text, re.MULTILINE))
    return sentence + (f"; perhaps {', '.join(found)}" if found else "")
