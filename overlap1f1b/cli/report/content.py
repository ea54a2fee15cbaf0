"""A report as JSON. Times are milliseconds per step, means over the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from overlap1f1b.profiling import Figures, Recording, Recordings, advice, figures_of, longest, verdict
from overlap1f1b.simulation import OverlapFigures, Timeline

PARTIAL = "Partial: "


def content_of(recordings: Recordings) -> dict[str, Any]:
    """Return the JSON of one run."""
    ranks = {recording: figures_of(recording) for recording in recordings.ranks}
    every = Figures.sum(ranks.values())
    sentence = verdict(every)
    return {
        "ranks": [_rank(recording, figures) for recording, figures in ranks.items()],
        "all": _figures(every),
        "longest_exposed": [span._asdict() for span in longest(recordings.ranks)],
        "verdict": f"{PARTIAL}{sentence}" if recordings.partial else sentence,
        "advice": advice(every),
        "partial": recordings.partial,
        "missing_ranks": list(recordings.missing),
        "left_out": list(recordings.left_out),
        "notes": [f"rank {recording.rank}: {note}" for recording in recordings.ranks for note in recording.notes],
    }


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


def compared(first: Mapping[str, Any], second: Mapping[str, Any], names: Sequence[str]) -> str:
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
        **_figures(figures),
        "open_actions": figures.open_actions or None,
    }


def _figures(of: Figures) -> dict[str, Any]:
    ms = of.per_step_ms
    return {
        "step_ms": ms(of.time),
        "compute_ms": ms(of.compute),
        **_overlap(of.overlap, of),
        "by_sub_op": {name: _overlap(part, of) for name, part in of.by_sub_op.items()},
        "by_phase": {name: _overlap(part, of) for name, part in of.by_phase.items()},
        "idle_ms": {name: ms(time) for name, time in of.idle.items()},
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
