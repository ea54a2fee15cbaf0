"""``overlap1f1b report``: read, print, compare, draw: also as one HTML file, with steps that can be zoomed."""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from rich.console import Console

from overlap1f1b.cli.draw import STYLES, paint, tracks_of_bars
from overlap1f1b.cli.options import PICTURES, ReportOptions, ReportOutput
from overlap1f1b.cli.report import figures
from overlap1f1b.cli.report.figures import LONGEST, content_of, print_table, remarks, tables_of
from overlap1f1b.plan.intervals import intersection
from overlap1f1b.profiling import Bar, Lanes, Recording, Recordings, aligned, arrows, bars_of, predicted_bars
from overlap1f1b.profiling.bars import predict
from overlap1f1b.profiling.reading import Progress, files_of, read
from overlap1f1b.schedule.values import counted
from overlap1f1b.simulation.drawing import LETTERS
from overlap1f1b.simulation.trace import write_trace
from overlap1f1b.terminal.output import Say, console, middle_left_out, print_lines, showing, write_json, writing


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

    def bar(times: Sequence[float], what: str, text: str = "", style: str = "peer", share: float = 1.0) -> list[float]:
        """Return a bar: its name, its times in milliseconds; ``share`` is of the track's height."""
        return [names.setdefault((what, text, style, share), len(names)), *(round(time, 4) for time in times)]

    ranks, steps = recordings.ranks, {}
    for number in sorted({step.number for recording in ranks for step in recording.steps}):
        tracks, marks = list[dict[str, Any]](), {}
        for name, cells in tracks_of_bars([*bars_of(ranks, number), *(predicted if number == drawn else ())]):
            _, rank, lane, *_ = name.split()
            flat = [bar((cell.start, cell.end), cell.what, cell.text, cell.style) for cell in cells]
            tracks.append({"name": name, "rank": int(rank), "measured": lane != "predicted", "cells": flat})
        for recording, step, by in aligned(ranks, number):
            lanes = Lanes(recording, step, recordings.others.get(step, ()))
            sent = recording.about.bytes.get(str(number), {})
            marks[recording.rank] = {
                "begin": (lanes.window[0] + by) / 1e6,
                "exposed": _ms(lanes.exposed, by),
                "why": {cause: _ms(intersection(times, lanes.exposed), by) for cause, times in lanes.idle.items()},
                "sent": {index: sent[what] for (what, *_), index in names.items() if what in sent},
            }
            if held := recording.held(step):  # as bars that are as high as what they hold
                sizes, times = [size for *_, size in held], _ms([times for *times, _ in held], by)
                said = [f"{size / 1e6:.3f} MB beyond those before the step" for size in sizes]
                most = max(sizes) or 1.0
                shares = [round(size / most, 3) for size in sizes]
                flat = [bar(at, what, share=share) for at, what, share in zip(times, said, shares, strict=True)]
                name = f"rank {recording.rank} held"
                tracks.append({"name": name, "rank": recording.rank, "measured": True, "cells": flat})
        tracks.sort(key=lambda track: track["rank"])
        steps[number] = {"tracks": tracks, "ranks": marks}
    return {"names": list(names), "steps": steps}


def _ms(intervals: Iterable[Sequence[float]], by: float) -> list[list[float]]:
    """Return intervals of a file in milliseconds, by the clock of all ranks."""
    return [[round((time + by) / 1e6, 4) for time in interval] for interval in intervals]


READ = "all files are read"


def report(options: ReportOptions) -> None:
    screen = console(options.output.json)
    with showing(screen, "starting") as say:
        if options.compare is not None:
            _compare(options.compare, screen, say, options.output.json)
        else:
            _report(options.files, options.output, screen, say)


def _report(files: Sequence[Path], output: ReportOutput, screen: Console, say: Say) -> None:
    recordings = read(*files, progress=reading(say, files))
    say(f"{READ}, now the figures")
    content = content_of(recordings)
    bars: list[Bar] = []
    predicted: list[Bar] = []
    if output.predicted or any(getattr(output, name) is not None for name in PICTURES):
        step = _drawn_step(recordings.ranks, output.step)
        bars = bars_of(recordings.ranks, step)
        if output.predicted:
            timelines = predict(recordings.ranks, step)
            for rank in content["ranks"]:
                rank["predicted"] = {"step": step, **figures.of_timeline(timelines[rank["rank"]])}
            predicted = predicted_bars(recordings.ranks, timelines)
            bars += predicted
        if not bars:
            raise ValueError(f"step {step} has nothing to draw; allowed: a step with spans")
        content["drawn_step"] = step
    elif output.step is not None:
        raise ValueError(f"--step {output.step} alone; allowed: with --{', --'.join(PICTURES)} or --predicted")
    say(f"{READ}, now the drawings")
    title = _title(recordings)
    about = {"title": f"{title}, step {content.get('drawn_step')}", "unit": "ms from the start of the step"}
    paint(tracks_of_bars(bars), output, screen, **about)
    if output.trace is not None:
        flows = [(source.event, target.event) for source, target in arrows(bars)]
        with writing("trace", output.trace, screen) as file:
            write_trace([bar.event for bar in bars], file, flows=flows)
    if output.html is not None:
        page = page_of(content, recordings, predicted, title)
        with writing("html", output.html, screen) as file:
            file.write_text(page, encoding="utf-8")
    write_json(output.json, content)
    print_lines(screen, title, style="bold")
    print_lines(screen, *remarks(content), *middle_left_out(content["notes"], str))
    for table in figures.tables_of(content):
        screen.print()
        print_table(table, screen)
    figures.print_verdict(content, screen)


def _compare(paths: Sequence[Path], screen: Console, say: Say, target: str | None) -> None:
    progress = reading(say, paths)
    contents = [content_of(read(path, progress=progress)) for path in paths]
    names = [str(path) for path in paths]
    sentence = figures.sentence_of(contents[0], contents[1], names)
    write_json(target, {"compare": contents, "verdict": sentence})
    for content, name in zip(contents, names, strict=True):
        lines = (*remarks(content), *middle_left_out(content["notes"], str))
        print_lines(screen, *(f"{name}: {line}" for line in lines))
    print_table(figures.comparison(contents, names), screen)
    screen.print()
    print_lines(screen, sentence, style="bold")


def _drawn_step(ranks: Sequence[Recording], wanted: int | None) -> int:
    numbers = [{step.number for step in recording.steps} for recording in ranks]
    every = sorted(set.union(*numbers))
    if wanted is None:
        return max(set.intersection(*numbers) or every)
    if wanted not in every:
        raise ValueError(f"--step {wanted}; allowed: {', '.join(map(str, every))}")
    return wanted


def _title(recordings: Recordings) -> str:
    ranks = recordings.ranks
    steps = sorted({len(recording.steps) for recording in ranks})
    sources = ", ".join(dict.fromkeys(recording.source for recording in ranks))
    first = "" if steps[0] == steps[-1] else f"{steps[0]} to "
    return f"{counted(len(ranks), 'rank')}, {first}{counted(steps[-1], 'step')} ({sources})"


def reading(say: Say, paths: Sequence[Path]) -> Progress:
    """Return a function that is told the bytes read of a file and passes them on to ``say``."""
    count, seen = len(files_of(*paths)), set[Path]()

    def tell(path: Path, read: int, size: int) -> None:
        seen.add(path)
        megabytes = f"{read / 2**20:.0f} of {size / 2**20:.0f} MiB"
        say(f"reading {path.name}, file {len(seen)} of {count}: {megabytes}")

    return tell
