"""The parser of the command line: tyro fills dataclasses of options, and its errors become one line."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import tyro

_WRONG_TYPE = {
    r"no type matching INT could be instantiated from \[(.*)\]": "a whole number",
    r"no type matching FLOAT could be instantiated from \[(.*)\]": "a number",
    r"invalid literal for int\(\) with base 10: (.*)": "a whole number",
    r"could not convert string to float: (.*)": "a number",
}
"""Patterns of tyro's messages about a value of the wrong type, and the words for the allowed values."""


def parse(argv: Sequence[str], verbs: Mapping[str, type], *, prog: str, description: str) -> Any:
    """Return the options of the verb that comes first; ``--help`` is printed and ends the process.

    Args:
        argv: Arguments, the verb first.
        verbs: The dataclass of options of each verb.
        prog: Name of the program.
        description: Text of ``--help`` about the program.

    Raises:
        ValueError: The verb or an option is unknown, or a value has the wrong type; the message names it in one line.
    """
    first = argv[0]
    if first not in verbs and first not in ("-h", "--help") and not first.startswith("--tyro-"):
        raise ValueError(f"unknown verb {first!r}; allowed: {', '.join(verbs)}, --help")
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            options = tyro.extras.subcommand_cli_from_dict(
                dict(verbs), args=argv, prog=prog, description=description, sort_subcommands=False
            )
    except SystemExit as error:
        if not error.code or first not in verbs:
            sys.stderr.write(said.getvalue())
            raise
        raise ValueError(f"{_one_line(said.getvalue())}; see {prog} {first} --help") from None
    sys.stderr.write(said.getvalue())
    return options


def _one_line(box: str) -> str:
    """Return the first sentence of tyro's box, drawn in Unicode or ASCII, and the names of similar options."""
    _, *lines, _ = box.strip().splitlines()
    paragraph, *others = re.split(r"\n[─-]+\n", "\n".join(line.strip("│| ") for line in lines))
    text = re.sub(r"-{4,}", "", paragraph.split("\n\n", 1)[0])
    sentence = " ".join(text.split()).rstrip(".").replace("{None}|", "")
    for pattern, kind in _WRONG_TYPE.items():
        sentence = re.sub(rf"Error parsing (\S+): {pattern}", rf"\1 \2; allowed: {kind}", sentence)
    similar = [text for text in others if text.startswith("Perhaps you meant")]
    names = dict.fromkeys(name for text in similar for name in re.findall(r"^--[\w-]+", text, re.MULTILINE))
    return sentence + (f"; perhaps {', '.join(names)}" if names else "")
