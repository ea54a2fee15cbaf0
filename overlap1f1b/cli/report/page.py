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
from overlap1f1b.cli.report.figures import LONGEST, remarks, tables_of
from overlap1f1b.plan.intervals import Intervals, intersection
from overlap1f1b.profiling import Bar, Lanes, Recordings, aligned, bars_of
from overlap1f1b.simulation.drawing import LETTERS

_UNIT_NS = 100  # nanoseconds of a unit of time in the page; page.js has the same


def page_of(content: Mapping[str, Any], recordings: Recordings, predicted: Sequence[Bar], title: str) -> str:
    """Return the text of the page; ``predicted`` are bars of the drawn step alone."""
    data = {
        "title": title,
        "content": content,
        "remarks": remarks(content),
        "tables": [table._asdict() | {"words": table.words} for table in tables_of(content)],
        "longest": LONGEST,
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
    """Return what page.js draws: names by their index, and of each step its tracks and the exposed times of ranks."""
    names: dict[tuple[str, str, str, float], int] = {}
    ranks, steps = recordings.ranks, {}
    for number in sorted({step.number for recording in ranks for step in recording.steps}):
        tracks, marks = list[dict[str, Any]](), {}
        for name, cells in tracks_of_bars([*bars_of(ranks, number), *(predicted if number == drawn else ())]):
            _, rank, lane, *_ = name.split()
            flat, now = [], 0
            for cell in cells:
                start, end = (_units(1e6 * time) for time in (cell.start, cell.end))
                bar = names.setdefault((cell.what, cell.text, cell.style, 1.0), len(names))
                flat += [bar, start - now, end - start]
                now = end
            tracks.append({"name": name, "rank": int(rank), "measured": lane != "predicted", "cells": flat})
        for recording, step, by in aligned(ranks, number):
            lanes = Lanes(recording, step, recordings.others.get(step, ()))
            sent = recording.about.bytes.get(str(number), {})
            marks[recording.rank] = {
                "begin": _units(lanes.window[0] + by),
                "exposed": _flat(lanes.exposed, by),
                "why": {cause: _flat(intersection(times, lanes.exposed), by) for cause, times in lanes.idle.items()},
                "sent": {index: sent[what] for (what, *_), index in names.items() if what in sent},
            }
            held, flat, now = recording.held(step), [], 0
            most = max((size for *_, size in held), default=0.0) or 1.0
            for begun, ended, size in held:  # as bars that are as high as what they hold
                start, end = max(now, _units(begun + by)), _units(ended + by)
                what = f"{size / 1e6:.3f} MB beyond those before the step"
                bar = names.setdefault((what, "", "peer", round(size / most, 3)), len(names))
                flat += [bar, start - now, max(0, end - start)]
                now = max(start, end)
            if held:
                tracks.append({"name": f"rank {recording.rank} held", "rank": recording.rank, "measured": True})
                tracks[-1]["cells"] = flat
        tracks.sort(key=lambda track: track["rank"])
        steps[number] = {"tracks": tracks, "ranks": marks}
    return {"names": list(names), "steps": steps}


def _units(nanoseconds: float) -> int:
    return round(nanoseconds / _UNIT_NS)


def _flat(intervals: Intervals, by: float) -> list[int]:
    return [_units(time + by) for interval in intervals for time in interval]
