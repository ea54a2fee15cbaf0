"""What fields of options say to tyro, the parser of the command line: ranges, defaults and help.

A field says what it takes: ``Annotated[int | None, by_default("INT", 4), Range(1)]``.
"""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass
from math import inf, isfinite
from typing import Annotated, Any, TypeVar, get_type_hints

import docstring_parser
import tyro

T = TypeVar("T")


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
