"""Programs as CSV files: one row a rank, one cell a slot, as torch writes its pipeline schedules."""

import csv
import re
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from overlap1f1b.schedule.action import Slot, actions_of, parse_slot
from overlap1f1b.schedule.placement import Placement
from overlap1f1b.schedule.values import check_size, quoted

_TRAFFIC = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*", re.ASCII)
"""Cells of communication in torch's tables; a plan derives communication from the actions."""

_ALLOWED = "allowed: a file of Program.to_csv, or of torch's schedules"
_LONGEST_NAME, _MOST_DIGITS = 200, 40

_NUMBERS = ("microbatches", "peak_activations", "peak_weights")


def write(ranks: Sequence[Sequence[Slot]], path: str | Path, header: Mapping[str, object]) -> None:
    """Write the rows of a program behind ``#`` lines of a header."""
    lines = [f"# {key}: {value}".rstrip() for key, value in header.items()]
    lines += [",".join(map(str, slots)) for slots in ranks]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def read(path: str | Path) -> tuple[dict[str, Any], Placement, tuple[tuple[Slot, ...], ...]]:
    """Return what a file of ``write``, or a table of torch's pipeline schedules, says of a program; and its rows.

    Blank cells and torch's communication cells are skipped. Without a header the placement follows from the rows.
    ValueError, with line, column and text, for a file that cannot be read, or is malformed.
    """
    path = Path(path)
    said: dict[str, Any] = {}
    rows: list[tuple[Slot, ...]] = []
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()  # spreadsheets begin a file with a byte order mark
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text; {_ALLOWED}") from None
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}; {_ALLOWED}") from error
    for number, line in enumerate(lines, 1):
        if line.startswith("#"):
            key, colon, value = line[1:].partition(":")
            if rows or not colon or key.strip() not in ("name", "pipes", *_NUMBERS):
                raise ValueError(
                    f"{path}, line {number}, column 1: {quoted(line)} is not a header line; allowed before the first "
                    f"rank: # with name, pipes, {', '.join(_NUMBERS)}, a colon and a value"
                )
            said[key.strip()] = _header(key.strip(), value, f"{path}, line {number}, column 1: ")
        elif line or number < len(lines):
            rows.append(_row(line, f"{path}, line {number}"))
    if not any(rows):
        raise ValueError(f"{path}, line {len(lines) + 1}, column 1: no action; allowed: a row of actions for each rank")
    ranks = tuple(rows)
    placement = said.pop("pipes") if "pipes" in said else _placement(ranks, path)
    return said, placement, ranks


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split()))


def _header(key: str, value: str, where: str) -> Any:
    """Return the value of a line of the header."""
    try:
        if key == "pipes":
            return Placement(tuple(map(_numbers, value.split(";"))))
        if key == "name":
            if len(value) > _LONGEST_NAME:
                raise ValueError(f"allowed: at most {_LONGEST_NAME} characters")
            return value.strip()
        if any(len(number) > _MOST_DIGITS for number in value.split()):
            raise ValueError(f"allowed: whole numbers of at most {_MOST_DIGITS} digits")
        numbers = (int(value),) if key == "microbatches" else _numbers(value)
        for number in numbers:
            check_size(key, number, 1 if key == "microbatches" else 0)
        return numbers[0] if key == "microbatches" else numbers
    except ValueError as error:
        what = str(error) if "allowed" in str(error) else "allowed: whole numbers"
        raise ValueError(f"{where}{quoted(value.strip())} as {key}: {what}") from None


def _row(line: str, where: str) -> tuple[Slot, ...]:
    """Return the actions of a rank from its line."""
    slots: list[Slot] = []
    try:
        cells = next(csv.reader([line], strict=True), [])
    except csv.Error as error:
        raise ValueError(f"{where}: {error} in {quoted(line.strip())}; allowed: actions between commas") from None
    for column, cell in enumerate(cells, 1):
        text = cell.strip()
        if not text or _TRAFFIC.fullmatch(text):
            continue
        try:
            slots.append(parse_slot(text))
        except ValueError as error:
            raise ValueError(f"{where}, column {column}: {error}") from None
    return tuple(slots)


def _placement(ranks: tuple[tuple[Slot, ...], ...], path: Path) -> Placement:
    """Return the placement that the rows imply: every stage is on the rank of its actions."""
    found: dict[tuple[int, int], int] = {}
    for rank, slots in enumerate(ranks):
        for action in (action for slot in slots for action in actions_of(slot)):
            before = found.setdefault((action.pipe, action.stage), rank)
            if before != rank:
                raise ValueError(
                    f"{path}: {action} is on rank {rank}, others of stage {action.stage} on rank {before}; "
                    "allowed: one rank a stage"
                )
    pipes = range(max(p for p, _ in found) + 1)
    stages = max(s for _, s in found) + 1
    for pipe in pipes:
        missing = next(stage for stage in count() if (pipe, stage) not in found)
        if missing < stages:
            raise ValueError(f"{path}: pipe {pipe} has no action of stage {missing}; allowed: stages 0 to {stages - 1}")
    try:
        return Placement(tuple(tuple(found[pipe, stage] for stage in range(stages)) for pipe in pipes))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
