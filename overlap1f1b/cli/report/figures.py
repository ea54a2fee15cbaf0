"""The figures of a report, as JSON and as tables. Times are milliseconds per step, means over the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from rich.console import Console

from overlap1f1b.profiling import Figures, Recording, Recordings, advice, figures_of, longest, verdict
from overlap1f1b.schedule.values import some
from overlap1f1b.simulation import CAUSES, OverlapFigures, Timeline
from overlap1f1b.terminal.output import middle_left_out, number, print_lines

OF_NODES = ("bytes", "held", "costs", "parameters", "standing")
"""What a profile says of its nodes and of its rank, not of the run."""
LONGEST = "Longest times of exposed exchange, milliseconds"
PARTIAL = "Of some ranks only: "
NOT_MEASURED = "not measured"
_OVERLAP = {"exchange": "exchange_ms", "hidden": "hidden_ms", "exposed": "exposed_ms", "share": "hidden_fraction"}
_COMPARED = {"step": "step_ms", "compute": "compute_ms", "exchange": "exchange_ms", "exposed": "exposed_ms"}
_COMPARED |= {"hidden": "hidden_fraction"}
_PHASES = {"warm_up": "warm-up", "steady": "steady", "cool_down": "cool-down"}


def content_of(recordings: Recordings) -> dict[str, Any]:
    """Return the JSON of one run."""
    ranks = {recording: figures_of(recording, recordings.others) for recording in recordings.ranks}
    about = max((recording.about for recording in recordings.ranks), key=lambda about: about.date)
    every = Figures.sum(ranks.values())
    sentence = verdict(every)
    standing = sorted({line for recording in recordings.ranks for line in recording.about.standing})
    return {
        "ranks": [_rank(recording, figures) for recording, figures in ranks.items()],
        "all": _json_of(every),
        "longest_exposed": [span._asdict() for span in longest(recordings.ranks)],
        "verdict": f"{PARTIAL}{sentence}" if recordings.partial else sentence,
        "advice": standing or advice(every, about),
        "about": {name: value for name, value in asdict(about).items() if name not in OF_NODES},
        "partial": recordings.partial,
        "missing_ranks": list(recordings.missing),
        "left_out": list(recordings.left_out),
        "notes": [f"rank {recording.rank}: {note}" for recording in recordings.ranks for note in recording.notes],
    }


def remarks(content: Mapping[str, Any]) -> list[str]:
    """Return the reasons why figures are partial, one line each."""
    missing, lines = content["missing_ranks"], []
    if missing:  # perhaps thousands, said as 0, 2 to 511
        there = set(missing)
        begins = [number for number in missing if number - 1 not in there]
        ends = [number for number in missing if number + 1 not in there]
        pairs = zip(begins, ends, strict=True)
        runs = ", ".join(f"{first}" if first == last else f"{first} to {last}" for first, last in pairs)
        lines.append(f"no file of rank {runs}: figures are of the other ranks alone")
    return lines + [f"left out: {text}" for text in content["left_out"]]


def of_timeline(timeline: Timeline, unit_ms: float = 1.0, *, alone: bool = False) -> dict[str, float | None]:
    """Return the JSON of one step, simulated or measured; ``alone``: no other rank shares this rank's experts."""
    exchange, exposed = (0.0, 0.0) if alone else (timeline.exchange, timeline.exposed)
    times = {"step_ms": timeline.makespan, "exchange_ms": exchange, "exposed_ms": exposed}
    share = timeline.hidden_fraction if exchange else None
    return {name: unit_ms * time for name, time in times.items()} | {"hidden_fraction": share}


def sentence_of(first: Mapping[str, Any], second: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return one sentence that compares two runs."""
    a, b = first["all"], second["all"]
    ratio = b["step_ms"] / a["step_ms"] if a["step_ms"] else 1.0
    if None in (a["exchange_ms"], b["exchange_ms"]):
        sentence = (
            f"{names[1]}'s step takes {ratio:.2f} times as long as {names[0]}'s; not both exchanges were measured."
        )
    else:
        one, other = ("nothing" if of["hidden_fraction"] is None else f"{of['hidden_fraction']:.0%}" for of in (a, b))
        change = _time(b["exposed_ms"] - a["exposed_ms"], "+")
        sentence = (
            f"{names[1]} hides {other} of its exchange and {names[0]} {one}; "
            f"its step takes {ratio:.2f} times as long, with {change} ms exposed."
        )
    return f"{PARTIAL}{sentence}" if first["partial"] or second["partial"] else sentence


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
        "offloaded_bytes": recording.offloaded_bytes,
    }


def _json_of(of: Figures) -> dict[str, Any]:
    ms = of.per_step_ms
    return {
        "step_ms": ms(of.time),
        "compute_ms": ms(of.compute),
        **_overlap(of.overlap, of),
        "by_sub_op": {name: _overlap(part, of) for name, part in of.by_sub_op.items()},
        "by_phase": {name: _overlap(part, of) for name, part in of.by_phase.items()},
        "idle_by_cause_ms": {name: ms(of.idle[name]) if of.idle else None for name in CAUSES},
        "exposed_by_cause_ms": {name: ms(of.by_cause[name]) if of.measured and of.idle else None for name in CAUSES},
    }


def _overlap(overlap: OverlapFigures, of: Figures) -> dict[str, float | None]:
    """Return the JSON of an overlap; its share is None without an exchange, all is None if it was not measured."""
    if not of.measured:
        return dict.fromkeys(_OVERLAP.values())
    return {
        "exchange_ms": of.per_step_ms(overlap.exchange),
        "hidden_ms": of.per_step_ms(overlap.hidden),
        "exposed_ms": of.per_step_ms(overlap.exposed),
        "hidden_fraction": overlap.hidden_fraction if overlap.exchange else None,
    }


class Table(NamedTuple):
    """A table of texts; a column is of words if one of its texts is no figure."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def words(self) -> list[str]:
        """Headings of the columns of words."""
        figures = ("", number(None, ""), NOT_MEASURED)
        columns = zip(self.headings, zip(*self.rows, strict=True), strict=True)
        return [name for name, texts in columns if any(t not in figures and t[0] not in "0123456789+-−" for t in texts)]


def tables_of(content: Mapping[str, Any]) -> list[Table]:
    every, ranks = content["all"], content["ranks"]
    columns = {"step": "step_ms", "compute": "compute_ms"} | _OVERLAP
    columns |= {name: f"exposed_by_cause_ms/{name}" for name in CAUSES}
    found = [_by_rank(content, "Milliseconds of a step", columns)]
    if every["exchange_ms"]:
        found += [_parts(every, "by_sub_op", "sub-op"), _parts(every, "by_phase", "phase")]
    if any(rank["peak_bytes"] is not None for rank in ranks):
        columns = {"parameters": "parameter_bytes", "most beyond them": "peak_bytes"}
        if any(rank["offloaded_bytes"] is not None for rank in ranks):
            columns["to host memory"] = "offloaded_bytes"
        found.append(_by_rank(content, "Memory of a step, MB", columns, mean=False))
    if any("predicted" in rank for rank in ranks):
        columns = {name: f"predicted/{key}" for name, key in _COMPARED.items() if name != "compute"}
        title = "Predicted from the times of its nodes, milliseconds"
        found.append(_by_rank(content, title, columns, mean=False))
    return [table for table in (*found, _longest(content["longest_exposed"])) if table.rows]


def comparison(contents: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Table:
    """Return a table of two runs side by side, with the change."""
    first, second = (content["all"] for content in contents)
    rows = [_compared(label, key, first[key], second[key]) for label, key in _COMPARED.items()]

    def absent(run: Mapping[str, Any]) -> float | None:
        return 0.0 if run["by_phase"] else None  # without ranges nobody knows

    for group in ("by_phase", "by_sub_op"):
        for name in dict.fromkeys((*first[group], *second[group])):
            pair = [run[group][name]["exposed_ms"] if name in run[group] else absent(run) for run in (first, second)]
            rows.append(_compared(f"exposed, {_PHASES.get(name, name)}", "exposed_ms", *pair))
    for name in CAUSES:
        pair = [run["exposed_by_cause_ms"][name] for run in (first, second)]
        rows.append(_compared(f"exposed by {name}", "exposed_ms", *pair))
    return Table("", ("ms a step", *names, "change"), rows)


def _compared(label: str, key: str, first: float | None, second: float | None) -> list[str]:
    change = number(None, "")
    if first is not None and second is not None:
        share = key.endswith("fraction")
        change = f"{100 * (second - first):+.1f} points" if share else _time(second - first, "+")
    return [label, figure(key, first), figure(key, second), change]


def print_table(table: Table, screen: Console) -> None:
    """Print a table, wider than the terminal if need be: rich would shorten figures."""
    widths = [max(map(len, column)) for column in zip(table.headings, *table.rows, strict=True)]
    left, lines = [heading in table.words for heading in table.headings], []
    for row in (table.headings, *table.rows):
        cells = zip(row, widths, left, strict=True)
        lines.append("  ".join(f"{text:{'<' if words else '>'}{width}}" for text, width, words in cells).rstrip())
    print_lines(screen, *([table.title] if table.title else []), style="bold")
    print_lines(screen, *lines)


def print_verdict(content: Mapping[str, Any], screen: Console) -> None:
    screen.print()
    print_lines(screen, content["verdict"], style="bold")
    print_lines(screen, *(f"try: {text}" for text in content["advice"]))


def _by_rank(content: Mapping[str, Any], title: str, columns: Mapping[str, str], mean: bool = True) -> Table:
    """Return a table of the ranks' figures at the path of each column, of several ranks also with their ``mean``."""

    def row(name: str, of: Mapping[str, Any]) -> list[str]:
        return [name, *(_at(of, path) for path in columns.values())]

    rows = [row(str(rank["rank"]), rank) for rank in content["ranks"]]
    shown = middle_left_out(rows, lambda gap: [gap, *[""] * len(columns)])
    if mean and len(rows) > 1:
        shown.append(row("mean", content["all"]))
    return Table(title, ("rank", *columns), shown)


def _at(of: Mapping[str, Any], path: str) -> str:
    """Return the text of the figure at a path of keys."""
    *outer, key = path.split("/")
    for name in outer:
        of = of[name]
    return figure(key, of[key])


def _parts(every: Mapping[str, Any], group: str, heading: str) -> Table:
    rows = [
        [_PHASES.get(name, name), *(figure(key, part[key]) for key in _OVERLAP.values())]
        for name, part in every[group].items()
    ]
    return Table(f"Milliseconds of a step by {heading}", (heading, *_OVERLAP), rows)


def _longest(spans: Sequence[Mapping[str, Any]]) -> Table:
    headings = ("exposed", "rank", "step", "at", "phase", "waited for", "in flight", "then")
    rows = []
    for span in spans:
        exposed, start = (figure(key, span[key]) for key in ("exposed_ms", "start_ms"))
        texts = (_PHASES.get(span["phase"], ""), span["waited_for"], some(span["in_flight"], 2), span["next"])
        rows.append([exposed, str(span["rank"]), str(span["step"]), start, *texts])
    return Table(LONGEST, headings, rows)


def figure(key: str, value: float | None) -> str:
    """Return the text of a figure in any table, by its key in the JSON; bytes are shown in MB."""
    if value is None:  # a share is also missing where nothing was exchanged
        return number(None, "") if key.endswith("fraction") else NOT_MEASURED
    if key.endswith("bytes"):
        return f"{value / 1e6:.3f}"
    return f"{value:.1%}" if key.endswith("fraction") else _time(value)


def _time(value: float, sign: str = "") -> str:
    """Return the text of milliseconds; a second and more has no decimals."""
    return format(value, f"{sign}.3f" if abs(value) < 1000 else f"{sign}.0f")
