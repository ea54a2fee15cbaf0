"""The process's arguments as options; what they cannot be, in one line."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import tyro


def parse(argv: Sequence[str], verbs: Mapping[str, type], *, prog: str, description: str) -> Any:
    """The options of the verb that comes first; ``--help`` is printed and ends the process.

    Args:
        argv: Arguments, the verb first.
        verbs: The dataclass of options of each verb.
        prog: Name of the program.
        description: Of the program, for ``--help``.

    Raises:
        ValueError: No such verb or option, or a value of a wrong type; says in one line which, and what is allowed.
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
        command = f"{prog} {first}"
        why = _refusal(command, dict(_options_of(verbs[first])), argv[1:])
        raise ValueError(why or f"{_first_paragraph(said.getvalue())}; allowed: see {command} --help") from None
    sys.stderr.write(said.getvalue())
    return options


def _options_of(cls: type) -> Iterator[tuple[str, Any]]:
    """Every option's name, dashes included, with the type of its value; no name for what needs none."""
    hints = get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        kind, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if dataclasses.is_dataclass(kind):
            yield from _options_of(kind)  # type: ignore[arg-type]
            continue
        if tyro.conf.Positional in notes:
            yield "", kind
            continue
        name = field.name.replace("_", "-")
        yield f"--{name}", kind
        if kind is bool and not notes:  # a flag that can be taken back
            yield f"--no-{name}", kind
        for note in notes:
            for alias in getattr(note, "aliases", None) or ():
                yield alias, kind


def _refusal(command: str, options: Mapping[str, Any], words: Sequence[str]) -> str | None:
    """The first word that cannot be; None if none is found that tyro would refuse."""
    option = typed = ""
    room = _room(options[""]) if "" in options else 0.0  # for values of the option
    for word in words:
        if re.match(r"--?[A-Za-z]", word) and not re.fullmatch(r"-(inf|nan)", word):
            if room == 1:
                break
            typed, equals, value = word.partition("=")
            option = typed.replace("_", "-")
            if option not in options:
                nearest = get_close_matches(option, options, 3)
                hint = f", nearest {', '.join(nearest)}" if nearest else ""
                return f"{typed} is no option of {command}; allowed: those of {command} --help{hint}"
            room = _room(options[option])
            if not equals:
                continue
        else:
            value = word
            if not room and "" in options:
                option, typed, room = "", "", _room(options[""])
        if not room:
            return f"{value!r} after {typed or command}; allowed: options, which begin with --"
        if not _fits(value, options[option]):
            return f"{typed} {value or repr(value)}; allowed: {_allowed(options[option])}"
        room -= 1 if room == 1 else 0
    if room == 1:
        return f"{typed} without a value; allowed: {_allowed(options[option])} after it"
    return None


def _plain(kind: Any) -> Any:
    """The type of a value that may also be left out."""
    return next((part for part in get_args(kind) if part is not NoneType), kind) if NoneType in get_args(kind) else kind


def _room(kind: Any) -> float:
    """How many values an option takes."""
    return 0 if kind is bool else float("inf") if get_origin(kind) is tuple else 1


def _fits(value: str, kind: Any) -> bool:
    kind = _plain(kind)
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind in (int, float):
        try:
            kind(value)
        except ValueError:
            return False
    return True


def _allowed(kind: Any) -> str:
    kind = _plain(kind)
    if get_origin(kind) is Literal:
        return ", ".join(get_args(kind))
    return {int: "a whole number", float: "a number", Path: "a file or folder"}.get(kind, "a text")


def _first_paragraph(box: str) -> str:
    """What tyro says at the top of its box, in one line."""
    lines = [line.strip("│ ") for line in box.splitlines() if not line.startswith(("╭", "╰"))]
    paragraph = "\n".join(lines).split("─", 1)[0]
    return " ".join(paragraph.split())
