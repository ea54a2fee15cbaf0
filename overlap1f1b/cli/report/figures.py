"""The figures of a report, as JSON and as tables. Times are milliseconds per step, means over the steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape

from overlap1f1b.profiling import Figures, Recording, Recordings, advice, figures_of, longest, verdict
from overlap1f1b.schedule.values import some
from overlap1f1b.simulation import OverlapFigures, Timeline
from overlap1f1b.terminal.output import middle_left_out, number, plain_table, print_lines

OF_NODES = ("bytes", "held", "parameters", "sharded")
"""What a profile says of its nodes and of its rank, not of the run."""
PARTIAL = "Of some ranks only: "
NO_SHARE = "–"
_GAP = 2  # columns of the terminal between two of a table
_COMPARED = {
    "step_ms": "step",
    "compute_ms": "compute",
    "exchange_ms": "exchange",
    "exposed_ms": "exposed",
    "hidden_fraction": "hidden",
}
_OVERLAP = {"exchange_ms": "exchange", "hidden_ms": "hidden", "exposed_ms": "exposed", "hidden_fraction": "share"}
_IDLE = {"exposed_exchange": "for exchange", "pipeline_bubble": "for the pipeline", "host_late": "for the host"}
_PHASES = {"warm_up": "warm-up", "steady": "steady", "cool_down": "cool-down"}


def content_of(recordings: Recordings) -> dict[str, Any]:
    """Return the JSON of one run."""
    ranks = {recording: figures_of(recording, recordings.late) for recording in recordings.ranks}
    about = max((recording.about for recording in recordings.ranks), key=lambda about: about.date)
    every = Figures.sum(ranks.values())
    sentence = verdict(every)
    return {
        "ranks": [_rank(recording, figures) for recording, figures in ranks.items()],
        "all": _json_of(every),
        "longest_exposed": [span._asdict() for span in longest(recordings.ranks)],
        "verdict": f"{PARTIAL}{sentence}" if recordings.partial else sentence,
        "advice": advice(every, about),
        "about": {name: value for name, value in asdict(about).items() if name not in OF_NODES},
        "partial": recordings.partial,
        "missing_ranks": list(recordings.missing),
        "left_out": list(recordings.left_out),
        "notes": [f"rank {recording.rank}: {note}" for recording in recordings.ranks for note in recording.notes],
    }


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


def add_predicted(content: dict[str, Any], timelines: Mapping[int, Timeline], step: int) -> None:
    """Add the figures of a simulated step to its rank's figures."""
    for rank in content["ranks"]:
        timeline = timelines[rank["rank"]]
        rank["predicted"] = {
            "step": step,
            "step_ms": timeline.makespan,
            "exchange_ms": timeline.exchange,
            "exposed_ms": timeline.exposed,
            "hidden_fraction": timeline.hidden_fraction if timeline.exchange else None,
        }


def sentence_of(first: Mapping[str, Any], second: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return one sentence that compares two runs."""
    a, b = first["all"], second["all"]
    ratio = b["step_ms"] / a["step_ms"] if a["step_ms"] else 1.0
    sentence = (
        f"{names[1]} hides {_share(b)} of its exchange and {names[0]} {_share(a)}; "
        f"its step takes {ratio:.2f} times as long, with {b['exposed_ms'] - a['exposed_ms']:+.3g} ms exposed."
    )
    return f"{PARTIAL}{sentence}" if first["partial"] or second["partial"] else sentence


def _share(figures: Mapping[str, Any]) -> str:
    share = figures["hidden_fraction"]
    return "nothing" if share is None else f"{share:.0%}"


def _rank(recording: Recording, figures: Figures) -> dict[str, Any]:
    return {
        "rank": recording.rank or 0,
        "file": str(recording.path),
        "source": recording.source,
        "told_by": recording.by,
        "mesh": {name: list(place) for name, place in recording.mesh.items()},
        "steps": figures.steps,
        **_json_of(figures),
        "open_actions": figures.open_actions or None,
        "parameter_bytes": recording.about.parameters or None,
        "peak_bytes": recording.peak_bytes,
    }


def _json_of(of: Figures) -> dict[str, Any]:
    ms = of.per_step_ms
    return {
        "step_ms": ms(of.time),
        "compute_ms": ms(of.compute),
        **_overlap(of.overlap, of),
        "by_sub_op": {name: _overlap(part, of) for name, part in of.by_sub_op.items()},
        "by_phase": {name: _overlap(part, of) for name, part in of.by_phase.items()},
        "idle_ms": {name: ms(time) for name, time in of.idle.items()},
        "late_peer_ms": None if of.late is None else ms(of.late),
        "starved_ms": ms(of.starved),
    }


def _overlap(overlap: OverlapFigures, of: Figures) -> dict[str, float | None]:
    """Return the JSON of an overlap; its share is None without an exchange."""
    return {
        "exchange_ms": of.per_step_ms(overlap.exchange),
        "hidden_ms": of.per_step_ms(overlap.hidden),
        "exposed_ms": of.per_step_ms(overlap.exposed),
        "hidden_fraction": overlap.hidden_fraction if overlap.exchange else None,
    }


Path = tuple[str | int, ...]
"""Keys of a figure in the JSON."""


class Cell(NamedTuple):
    """A figure as text, with its keys in the JSON."""

    text: str
    path: Path = ()


class Table(NamedTuple):
    """Rows of cells under headings."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def tables_of(content: Mapping[str, Any]) -> list[Table]:
    """Return all tables of a run that have rows."""
    found = [
        _per_rank(content),
        _parts(content, "by_sub_op", "sub-op", {}),
        _parts(content, "by_phase", "phase", _PHASES),
        _late(content),
        _memory(content),
        _predicted(content),
        _longest(content["longest_exposed"]),
    ]
    return [table for table in found if table.rows]


def comparison(contents: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Table:
    """Return a table of two runs side by side, with the change."""
    first, second = (content["all"] for content in contents)
    rows = [_compared(label, key, first[key], second[key]) for key, label in _COMPARED.items()]
    for group, labels in (("by_phase", _PHASES), ("by_sub_op", {})):
        for name in dict.fromkeys((*first[group], *second[group])):
            pair = [run[group].get(name, {"exposed_ms": 0.0})["exposed_ms"] for run in (first, second)]
            rows.append(_compared(f"exposed, {labels.get(name, name)}", "exposed_ms", *pair))
    for name, text in _IDLE.items():
        rows.append(_compared(f"idle {text}", "idle_ms", first["idle_ms"][name], second["idle_ms"][name]))
    return Table("", ("ms a step", *names, "change"), rows)


def _compared(label: str, key: str, first: float | None, second: float | None) -> list[Cell]:
    change = NO_SHARE
    if first is not None and second is not None:
        share = key.endswith("fraction")
        change = f"{100 * (second - first):+.1f} points" if share else f"{second - first:+.3f}"
    return [Cell(text) for text in (label, figure(key, first), figure(key, second), change)]


def print_table(table: Table, screen: Console) -> None:
    """Print a table; for a narrow terminal in parts, each with the first column, so that no figure is shortened."""
    for part in _fitted(table, screen.width):
        names = [
            heading
            for place, heading in enumerate(part.headings)
            if not all(_numeric(row[place].text) for row in part.rows)
        ]
        drawn = plain_table(part.headings, names)
        drawn.title, drawn.title_justify, drawn.title_style = part.title or None, "left", "bold"
        for row in part.rows:
            drawn.add_row(*(escape(cell.text) for cell in row))
        screen.print(drawn)


def _numeric(text: str) -> bool:
    return text in ("", NO_SHARE) or text[0].isdigit() or text[0] in "+-−"


def _fitted(table: Table, width: int) -> list[Table]:
    cells = [[row[place].text for row in table.rows] for place in range(len(table.headings))]
    widths = [max(map(len, (heading, *texts))) for heading, texts in zip(table.headings, cells, strict=True)]
    parts, used = [[0]], widths[0]
    for place in range(1, len(widths)):
        used += _GAP + widths[place]
        if used > width and len(parts[-1]) > 1:
            parts.append([0])
            used = widths[0] + _GAP + widths[place]
        parts[-1].append(place)
    return [
        Table(
            table.title if number == 0 else "",
            [table.headings[place] for place in part],
            [[row[place] for place in part] for row in table.rows],
        )
        for number, part in enumerate(parts)
    ]


def print_verdict(content: Mapping[str, Any], screen: Console) -> None:
    """Print the verdict and the advice."""
    screen.print()
    print_lines(screen, content["verdict"], style="bold")
    print_lines(screen, *(f"try: {text}" for text in content["advice"]))


Cells = Callable[[Mapping[str, Any], Path], list[Cell]]
"""Returns the cells of a rank by its JSON and the keys that lead there."""


def _of_ranks(content: Mapping[str, Any], cells: Cells) -> list[list[Cell]]:
    """Return a row with these cells for each rank, of many for the first and last ones."""
    rows = [[Cell(str(rank["rank"])), *cells(rank, ("ranks", place))] for place, rank in enumerate(content["ranks"])]
    return middle_left_out(rows, lambda gap: [Cell(gap), *[Cell("")] * (len(rows[0]) - 1)])


def _by_rank(content: Mapping[str, Any], cells: Cells) -> list[list[Cell]]:
    """Return the same with a row for the mean of several."""
    rows = _of_ranks(content, cells)
    return rows if len(rows) == 1 else [*rows, [Cell("mean"), *cells(content["all"], ("all",))]]


def _per_rank(content: Mapping[str, Any]) -> Table:
    def cells(of: Mapping[str, Any], path: Path) -> list[Cell]:
        found = [_cell(of, path, key) for key in ("step_ms", "compute_ms", *_OVERLAP)]
        return found + [_cell(of["idle_ms"], (*path, "idle_ms"), key) for key in _IDLE]

    headings = ("rank", "step", "compute", *_OVERLAP.values(), *(f"idle {text}" for text in _IDLE.values()))
    return Table("Milliseconds of a step", headings, _by_rank(content, cells))


def _parts(content: Mapping[str, Any], key: str, heading: str, names: Mapping[str, str]) -> Table:
    parts = content["all"][key] if content["all"]["exchange_ms"] else {}
    rows = [
        [Cell(names.get(name, name)), *(_cell(part, ("all", key, name), figure) for figure in _OVERLAP)]
        for name, part in parts.items()
    ]
    return Table(f"Milliseconds of a step by {heading}", (heading, *_OVERLAP.values()), rows)


def _late(content: Mapping[str, Any]) -> Table:
    keys = {"exposed_ms": "exposed", "late_peer_ms": "late peer"}
    rows = _by_rank(content, lambda of, path: [_cell(of, path, key) for key in keys])
    shown = content["all"]["late_peer_ms"] is not None
    return Table("Waits for late peers, ms", ("rank", *keys.values()), rows if shown else [])


def _memory(content: Mapping[str, Any]) -> Table:
    keys = {"parameter_bytes": "parameters", "peak_bytes": "most beyond them"}
    rows = _of_ranks(content, lambda of, path: [_cell(of, path, key) for key in keys])
    shown = any(rank["peak_bytes"] is not None for rank in content["ranks"])
    return Table("Memory of a step, MB", ("rank", *keys.values()), rows if shown else [])


def _predicted(content: Mapping[str, Any]) -> Table:
    keys = {key: label for key, label in _COMPARED.items() if key != "compute_ms"}
    rows = [
        [Cell(str(rank["rank"])), *(_cell(rank["predicted"], ("ranks", place, "predicted"), key) for key in keys)]
        for place, rank in enumerate(content["ranks"])
        if "predicted" in rank
    ]
    return Table("Predicted from the times of its nodes, milliseconds", ("rank", *keys.values()), rows)


def _longest(spans: Sequence[Mapping[str, Any]]) -> Table:
    headings = ("exposed", "rank", "step", "at", "phase", "waited for", "in flight", "then")
    rows = []
    for place, span in enumerate(spans):
        path = ("longest_exposed", place)
        texts = (_PHASES.get(span["phase"], ""), span["waited_for"], some(span["in_flight"], 2), span["next"])
        numbers = [Cell(str(span[key]), (*path, key)) for key in ("rank", "step")]
        rows.append([_cell(span, path, "exposed_ms"), *numbers, _cell(span, path, "start_ms"), *map(Cell, texts)])
    return Table("Longest times of exposed exchange, milliseconds", headings, rows)


def _cell(figures: Mapping[str, Any], path: Path, key: str) -> Cell:
    return Cell(figure(key, figures[key]), (*path, key))


def figure(key: str, value: float | None) -> str:
    """Return the text of a figure in any table, by its key in the JSON; bytes are shown in MB."""
    if key.endswith("bytes"):
        return number(None if value is None else value / 1e6, ".3f")
    return number(value, ".1%" if key.endswith("fraction") else ".3f")
