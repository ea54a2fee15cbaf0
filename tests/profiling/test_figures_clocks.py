"""What the records of ranks that share an exchange say of each other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from overlap1f1b.plan import About, Label
from overlap1f1b.profiling import Figures, advice, figures_of, read, verdict
from tests.profiling.synthetic import LANE, MAIN, Events, Range, write_chrome, write_record
from tests.tiers import wide

MS = 1_000_000
Timed = tuple[str, str, float, float]
NONE = dict.fromkeys(("host", "link", "pipeline"), 0)


def spans(posted: float) -> list[Timed]:
    """Compute until an exchange is ``posted``, which ends at 30 ms, and of which the first 2 ms are hidden."""
    times = [
        ("node", "attention.f[0] m0", 0.0, posted),
        ("flight", "dispatch.f[0] m0", posted, 30.0),
        ("node", "dense.f[1] m1", posted, posted + 2.0),
        ("node", "experts.f[0] m0", 30.0, 40.0),
        ("node", "attention.b[0] m0", 40.0, 50.0),
    ]
    return [(kind, node, start / 1e3, end / 1e3) for kind, node, start, end in times]


def figures(folder: Path, *posted: float, others: Sequence[Timed] = ()) -> list[Figures]:
    """Of ranks, ``others`` are further spans of each."""
    for rank, at in enumerate(posted):
        record, mesh = [*spans(at), *others], {"ep": (rank, len(posted))}
        write_record(folder / f"rank{rank}.json", [record], rank=rank, mesh=mesh, seconds=0.05)
    run = read(folder)
    return [figures_of(recording, run.others) for recording in run.ranks]


def test_a_rank_waits_until_the_last_one_has_posted(tmp_path: Path) -> None:
    early, late = figures(tmp_path, 10.0, 25.0)
    assert early.overlap.exposed == 18 * MS
    assert early.by_cause == pytest.approx({"order": 3 * MS, "imbalance": 15 * MS} | NONE)  # it could have ended at 15
    assert late.by_cause == pytest.approx({"order": 3 * MS, "imbalance": 0} | NONE)
    every = Figures.sum([early, late])
    assert sum(every.by_cause.values()) == every.overlap.exposed
    assert "By cause: 71% imbalance, 29% order." in verdict(every)
    assert any("ranks wait for a slower one" in tip for tip in advice(early))
    assert not any("slower one" in tip for tip in advice(late))


@pytest.mark.parametrize("skew", [5 * MS, *wide(-3 * MS)])
def test_clocks_of_ranks_need_not_agree(tmp_path: Path, skew: int) -> None:
    """Of traces: a record counts from the start of each step."""
    expected = figures(tmp_path, 10.0, 25.0)
    for rank, at in enumerate((10.0, 25.0)):
        (tmp_path / f"rank{rank}.json").unlink()
        ranges = [Range(str(Label(rank, {"ep": (rank, 2)})), 0, 50 * MS), Range("o1 step 1", 0, 50 * MS)]
        for kind, node, *times in spans(at):
            flies = kind == "flight"
            start, end = (round(1e3 * time * MS) for time in times)
            ranges.append(Range(f"o1 {'flight ' * flies}{node}", start, end, LANE if flies else MAIN))
        write_chrome(tmp_path / f"{rank}.json", Events(ranges).shifted(5 * MS + rank * skew))
    run = read(tmp_path)
    found = [figures_of(recording, run.others) for recording in run.ranks]
    assert [of.by_cause for of in found] == [pytest.approx(of.by_cause) for of in expected]


@pytest.mark.parametrize(("until", "imbalance"), [(20.0, 15), *wide((28.0, 15))])
def test_an_exchange_under_way_changes_no_cause(tmp_path: Path, until: float, imbalance: float) -> None:
    """All ranks have posted another one, which moves rows while a rank waits for the last to post its next."""
    other = ("flight", "combine.f[0] m1", 0.012, until / 1e3)
    early, late = figures(tmp_path, 10.0, 25.0, others=[other])
    assert early.by_cause == pytest.approx({"order": (18 - imbalance) * MS, "imbalance": imbalance * MS} | NONE)
    assert late.by_cause["imbalance"] == 0


def test_nothing_is_waited_for_where_all_post_at_once_and_nothing_said_without_the_other_rank(tmp_path: Path) -> None:
    assert [found.by_cause["imbalance"] for found in figures(tmp_path, 10.0, 10.0)] == [0, 0]
    run = read(write_record(tmp_path / "a.json", [spans(10.0)], mesh={"ep": (0, 2)}))
    assert not any(run.others.values())


def test_a_record_has_the_costs_of_its_plan_so_a_link_may_be_slow(tmp_path: Path) -> None:
    path = write_record(tmp_path / "a.json", [spans(10.0)], mesh={"ep": (0, 1)})
    path.write_text(json.dumps(json.loads(path.read_text()) | {"about": {"costs": {"dispatch.f[0] m0": 0.012}}}))
    found = figures_of(read(path).ranks[0])
    assert found.by_cause == pytest.approx({"order": 10 * MS, "imbalance": 0} | NONE | {"link": 8 * MS})
    assert any("exchanges take longer than planned for 16% of a step" in tip for tip in advice(found))


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
