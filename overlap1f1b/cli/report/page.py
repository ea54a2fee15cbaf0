"""The report as one HTML file: steps that can be zoomed, with the tables below. It needs no other file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from rich.console import Console

from overlap1f1b.cli.draw import STYLES, tracks_of_bars
from overlap1f1b.cli.report.figures import Cell, Table, tables_of
from overlap1f1b.plan.intervals import Intervals
from overlap1f1b.profiling import Bar, Lanes, Recordings, aligned, bars_of
from overlap1f1b.simulation.drawing import LETTERS
from overlap1f1b.terminal.output import writing

_UNIT = 1e-4
"""Milliseconds of a unit of time in the page; page.js has the same."""


def write_page(
    content: Mapping[str, Any],
    recordings: Recordings,
    predicted: Sequence[Bar],
    path: Path,
    *,
    title: str,
    screen: Console,
) -> None:
    """Write the page, and tell the screen; ``predicted`` are bars of the drawn step alone."""
    here = files(__package__)
    data = json.dumps(_data(content, recordings, predicted), separators=(",", ":")).replace("</", r"<\/")
    page = Template(here.joinpath("page.html").read_text(encoding="utf-8")).substitute(
        title=escape(title),
        verdict=escape(content["verdict"]),
        remarks=_remarks(content, title),
        codes=escape(_CODES),
        tables="\n".join(map(_table, tables_of(content))),
        data=data,
        script=here.joinpath("page.js").read_text(encoding="utf-8"),
    )
    with writing("html", path, screen) as file:
        file.write_text(page, encoding="utf-8")


def _data(content: Mapping[str, Any], recordings: Recordings, predicted: Sequence[Bar]) -> dict[str, Any]:
    """Return what page.js draws: names by their index, and of each step its tracks and the exposed times of ranks."""
    names: dict[tuple[str, str, str], int] = {}
    ranks, steps = recordings.ranks, {}
    for number in sorted({step.number for recording in ranks for step in recording.steps}):
        bars = [*bars_of(ranks, number), *(predicted if number == content["drawn_step"] else ())]
        tracks = []
        for name, cells in tracks_of_bars(bars):
            _, rank, *more = name.split()
            flat, now = [], 0
            for cell in cells:
                start, end = round(cell.start / _UNIT), round(cell.end / _UNIT)
                flat += [names.setdefault((cell.what, cell.text, cell.style), len(names)), start - now, end - start]
                now = end
            tracks.append({"name": name, "rank": int(rank), "measured": more[0] != "predicted", "cells": flat})
        marks = {}
        for recording, step, by in aligned(ranks, number):
            lanes = Lanes(recording, step)
            sent = recording.about.bytes.get(str(number), {})
            marks[str(recording.rank)] = {
                "begin": _units(lanes.window[0] + by),
                "exposed": _flat(lanes.exposed, by),
                "late": _flat(recordings.late.get(step, []), by),
                "sent": {index: sent[what] for (what, _, _), index in names.items() if what in sent},
            }
        steps[number] = {"tracks": tracks, "ranks": marks}
    return {
        "drawn": content["drawn_step"],
        "styles": {key: {"colour": style.colour, "label": style.label} for key, style in STYLES.items()},
        "names": list(names),
        "steps": steps,
        "longest": content["longest_exposed"],
        "ranks": [{"rank": rank["rank"], "parts": _parts(rank)} for rank in content["ranks"]],
    }


def _units(nanoseconds: float) -> int:
    return round(nanoseconds / 1e6 / _UNIT)


def _flat(intervals: Intervals, by: float) -> list[int]:
    return [_units(time + by) for interval in intervals for time in interval]


def _parts(rank: Mapping[str, Any]) -> list[float]:
    """Return the parts of a step, ms: compute alone, with exchange, exposed, late, idle for pipeline and for host."""
    hidden, idle, late = rank["hidden_ms"], rank["idle_ms"], rank["late_peer_ms"] or 0.0
    exposed = idle["exposed_exchange"] - late
    parts = (rank["compute_ms"] - hidden, hidden, exposed, late, idle["pipeline_bubble"], idle["host_late"])
    return [round(part, 4) for part in parts]


_CODES = (
    "Codes: "
    + ", ".join(f"{letter} {op}" for op, letter in LETTERS.items() if "recompute" not in op)
    + "; a small letter is the backward of the same sub-op, w its weight gradient, r its recomputation; the number is "
    "the microbatch; a number in front is the stage, ' the second pipe. ew0: weight gradient of the experts of "
    "microbatch 0. A second row of a lane, such as exchange (2), has what travels at the same time."
)


def _remarks(content: Mapping[str, Any], title: str) -> str:
    about, mesh = content["about"], content["ranks"][0]["mesh"]
    facts = [title, " × ".join(f"{name} {size}" for name, (_, size) in mesh.items())]
    if about["schedule"]:
        facts += [f"{about['schedule']}, overlap {about['overlap']}", f"{about['microbatches']} microbatches"]
        facts += [about["model"], f"plan: {about['choice']}", about["date"]]
    of = content["ranks"][0]["steps"]
    means = f"Bars and tables are means over {of} steps; the timeline shows one." if of > 1 else ""
    marked = [f'<p class="partial">{escape(text)}</p>' for text in remarks(content)]
    lines = [*content["notes"], *(f"Try: {text}." for text in content["advice"])]
    dim = [f'<p class="dim">{escape(text)}</p>' for text in (" · ".join(filter(None, facts)), means) if text]
    return "\n".join([*dim, *marked, *(f"<p>{escape(text)}</p>" for text in lines)])


def remarks(content: Mapping[str, Any]) -> list[str]:
    """Return the reasons why figures are partial, one line each."""
    missing = _runs(content["missing_ranks"])
    lines = [f"no file of rank {missing}: figures are of the other ranks alone"] if missing else []
    return lines + [f"left out: {text}" for text in content["left_out"]]


def _runs(numbers: Sequence[int]) -> str:
    """Return numbers as runs, such as ``0, 2 to 511``: thousands of ranks may have no file."""
    there = set(numbers)
    begins = [number for number in numbers if number - 1 not in there]
    ends = [number for number in numbers if number + 1 not in there]
    pairs = zip(begins, ends, strict=True)
    return ", ".join(f"{first}" if first == last else f"{first} to {last}" for first, last in pairs)


def _table(table: Table) -> str:
    caption = f"<caption>{escape(table.title)}</caption>" if table.title else ""
    classes = ["" if cell.path else ' class="text"' for cell in table.rows[0]]
    pairs = zip(classes, table.headings, strict=True)
    head = "".join(f"<th{of}>{escape(heading)}</th>" for of, heading in pairs)
    body = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in table.rows)
    return f'<div class="wide"><table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(cell: Cell) -> str:
    """Return the HTML of a figure, with its keys in the JSON."""
    if cell.path:
        return f'<td data-path="{escape("/".join(map(str, cell.path)))}">{escape(cell.text)}</td>'
    return f'<td class="text">{escape(cell.text)}</td>'
