"""The report as one HTML file: steps that can be zoomed, with the tables below. It needs no other file."""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from overlap1f1b.cli.draw import STYLES, tracks_of_bars
from overlap1f1b.cli.report.figures import remarks, tables_of
from overlap1f1b.plan import CostKey, cost_key
from overlap1f1b.plan.intervals import Intervals
from overlap1f1b.profiling import Bar, Lanes, Recording, Recordings, StepRecord, aligned, bars_of
from overlap1f1b.simulation.drawing import LETTERS, style_of

_UNIT_NS = 100
"""Nanoseconds of a unit of time in the page; page.js has the same."""


def page_of(content: Mapping[str, Any], recordings: Recordings, predicted: Sequence[Bar], title: str) -> str:
    """Return the text of the page; ``predicted`` are bars of the drawn step alone."""
    data = {
        "title": title,
        "content": content,
        "remarks": remarks(content),
        "tables": tables_of(content),
        "styles": {key: style._asdict() for key, style in STYLES.items()},
        "letters": LETTERS,
        **_timelines(recordings, predicted, content["drawn_step"]),
    }
    here = files(__package__)
    return Template(here.joinpath("page.html").read_text(encoding="utf-8")).substitute(
        title=escape(title),
        data=b64encode(gzip.compress(json.dumps(data, separators=(",", ":")).encode(), mtime=0)).decode(),
        script=here.joinpath("page.js").read_text(encoding="utf-8"),
    )


def _timelines(recordings: Recordings, predicted: Sequence[Bar], drawn: int) -> dict[str, Any]:
    """Return what page.js draws: names by their index, and of each step its tracks and the exposed times of ranks.

    ``held`` has the bytes of nodes by their names, as :class:`~overlap1f1b.plan.Held` says; ``orders`` has those nodes.
    """
    names: dict[tuple[str, str, str], int] = {}
    held: dict[int, list[float]] = {}
    orders: dict[tuple[int, ...], int] = {}  # many steps and ranks share one
    ranks, steps = recordings.ranks, {}
    for number in sorted({step.number for recording in ranks for step in recording.steps}):
        tracks, marks = [], {}
        for name, cells in tracks_of_bars([*bars_of(ranks, number), *(predicted if number == drawn else ())]):
            _, rank, lane, *_ = name.split()
            flat, now = [], 0
            for cell in cells:
                start, end = (_units(1e6 * time) for time in (cell.start, cell.end))
                flat += [names.setdefault((cell.what, cell.text, cell.style), len(names)), start - now, end - start]
                now = end
            tracks.append({"name": name, "rank": int(rank), "measured": lane != "predicted", "cells": flat})
        for recording, step, by in aligned(ranks, number):
            lanes, sent = Lanes(recording, step), recording.about.bytes.get(str(number), {})
            marks[recording.rank] = {
                "begin": _units(lanes.window[0] + by),
                "exposed": _flat(lanes.exposed, by),
                "late": _flat(recordings.late.get(step, []), by),
                "sent": {index: sent[what] for (what, _, _), index in names.items() if what in sent},
                "parameters": recording.about.parameters,
                "sharded": recording.about.sharded,
            }
            if recording.held.bytes:
                order = _order(recording, step, names, held)
                marks[recording.rank]["order"] = orders.setdefault(order, len(orders))
        steps[number] = {"tracks": tracks, "ranks": marks}
    return {"names": list(names), "steps": steps, "held": held, "orders": list(orders)}


def _order(
    recording: Recording, step: StepRecord, names: dict[tuple[str, str, str], int], held: dict[int, list[float]]
) -> tuple[int, ...]:
    """Return the names of the nodes of a step that hold bytes, in issue order, and note what they hold.

    The first of the nodes with one cost holds more than the others: its index is inverted.
    """
    indices, begun, order = {what: index for (what, _, _), index in names.items()}, set[CostKey](), []
    for node in recording.order(step):
        holds = recording.held.bytes.get(key := cost_key(node), ())
        if any(holds):
            if (what := str(node)) not in indices:  # nothing that could be drawn
                indices[what] = names[what, "", style_of(node)] = len(names)
            held[indices[what]] = list(holds)
            order.append(indices[what] if key in begun else ~indices[what])
            begun.add(key)
    return tuple(order)


def _units(nanoseconds: float) -> int:
    return round(nanoseconds / _UNIT_NS)


def _flat(intervals: Intervals, by: float) -> list[int]:
    return [_units(time + by) for interval in intervals for time in interval]
