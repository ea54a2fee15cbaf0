"""Waits for late peers, by the records of the ranks that share an exchange."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from overlap1f1b.plan import About
from overlap1f1b.profiling import Figures, advice, figures_of, read, verdict
from tests.profiling.synthetic import write_record
from tests.tiers import wide

MS = 1_000_000


def spans(posted: float, *, clock: float = 0.0) -> list[tuple[str, str, float, float]]:
    """Compute until 10 ms, then an exchange from ``posted`` to 30 ms, of which the first 2 ms are hidden."""
    times = [
        ("node", "attention.f[0] m0", 0.0, 10.0),
        ("flight", "dispatch.f[0] m0", posted, 30.0),
        ("node", "dense.f[1] m1", 10.0, 12.0),
        ("node", "experts.f[0] m0", 30.0, 40.0),
        ("node", "attention.b[0] m0", 40.0, 50.0),
    ]
    return [(kind, node, (start + clock) / 1e3, (end + clock) / 1e3) for kind, node, start, end in times]


def figures(folder: Path, *posted: float, clock: float = 0.0) -> list[Figures]:
    for rank, at in enumerate(posted):
        mesh = {"ep": (rank, len(posted))}
        record = [spans(at, clock=clock * rank)]
        write_record(folder / f"rank{rank}.json", record, rank=rank, mesh=mesh, seconds=0.05 + clock / 1e3)
    run = read(folder)
    return [figures_of(recording, run.late) for recording in run.ranks]


@pytest.mark.parametrize("clock", [0.0, *wide(5.0)])
def test_a_rank_waits_until_the_last_one_has_posted(tmp_path: Path, clock: float) -> None:
    early, late = figures(tmp_path, 10.0, 25.0, clock=clock)
    assert early.overlap.exposed == 18 * MS
    assert early.late == 13 * MS  # from 12 ms, where compute ends, to 25 ms
    assert late.late == 0
    every = Figures.sum([early, late])
    assert every.late == 13 * MS
    if not clock:
        assert "For 13% of a step ranks waited for a late peer, not for the network." in verdict(every)
    assert any("ranks wait for a late peer" in tip for tip in advice(early))
    assert not any("late peer" in tip for tip in advice(late))


def test_an_exchange_under_way_is_no_wait(tmp_path: Path) -> None:
    """Another exchange, which all ranks have posted, moves rows meanwhile."""
    for rank, posted in enumerate((10.0, 25.0)):
        other = [("flight", "combine.f[0] m1", 0.012, 0.020)]
        write_record(tmp_path / f"{rank}.json", [spans(posted) + other], rank=rank, mesh={"ep": (rank, 2)})
    run = read(tmp_path)
    assert figures_of(run.ranks[0], run.late).late == 5 * MS


def test_nothing_is_waited_for_where_all_post_at_once_and_nothing_said_without_the_other_rank(tmp_path: Path) -> None:
    assert [found.late for found in figures(tmp_path, 10.0, 10.0)] == [0, 0]
    run = read(write_record(tmp_path / "a.json", [spans(10.0)], mesh={"ep": (0, 2)}))
    assert figures_of(run.ranks[0], run.late).late is None


def test_advice_knows_what_the_engine_chose(tmp_path: Path) -> None:
    one = [(kind, node.replace("m1", "m0"), start, end) for kind, node, start, end in spans(10.0)]
    path = write_record(tmp_path / "a.json", [one], mesh={"ep": (0, 1)})
    (tip, *_) = advice(figures_of(read(path).ranks[0]))
    assert tip == "one action was open at a time: overlap=3, or overlap='pairs' with combined_1f1b"
    choice = "1f1b k=1 (measured step: 1f1b k=1: 112 ms, 1f1b k=3: 130 ms)"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"about": {"overlap": "3", "choice": choice}}))
    (recording,) = read(path).ranks
    assert recording.about == About(overlap="3", choice=choice)
    (tip, *_) = advice(figures_of(recording), recording.about)
    assert f"overlap=3 was asked for, and the engine chose {choice}; overlap gains where" in tip
