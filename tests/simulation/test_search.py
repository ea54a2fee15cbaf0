"""The search against trying everything by hand."""

import random
from contextlib import suppress
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap1f1b.plan import NodeCosts
from overlap1f1b.schedule import SCHEDULES, build_schedule
from overlap1f1b.simulation import Costs, simulate
from overlap1f1b.simulation.search import OVERLAPS, Candidate, NodeModel, Outcome, candidates, play, search


def everything(ranks: int, microbatches: int, costs: Costs) -> dict[tuple[str, int, int], tuple[float, float]]:
    """Makespans and peaks of all that can be built, by name, chunks and extra warm-up."""
    found = {}
    for key in product(SCHEDULES, (1, 2, 3, 4), (0, 1, 2)):
        name, chunks, extra = key
        with suppress(ValueError):
            program = build_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks, extra_warmup=extra)
            timeline = simulate(program, costs)
            found[key] = timeline.makespan, max(map(timeline.peak_activations, range(ranks)))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [1, 8])  # an even and an odd sum of both have other limits
def test_finds_what_brute_force_finds(ranks: int, microbatches: int) -> None:
    draw = random.Random(f"{ranks} {microbatches}")
    choices = {"forward": (1, 1.5), "backward": (2, 3), "weight": (0.5, 1), "pair": (0.75, 1.0), "send": (0, 0.25)}
    costs = Costs(**{name: draw.choice(values) for name, values in choices.items()})
    built = everything(ranks, microbatches, costs)
    for memory in (1.0, float("inf")) if (ranks + microbatches) % 2 else (2.5, 4.0):
        ranking = search(
            list(candidates()), ranks=ranks, microbatches=microbatches, model=costs, peak_activations=memory
        )
        got = {
            (c.schedule, c.options["chunks"], c.options.get("extra_warmup", 0)): outcome.makespan
            for c, outcome in ranking.found
        }
        assert got == {key: makespan for key, (makespan, peak) in built.items() if peak <= memory}
        makespans = [outcome.makespan for _, outcome in ranking.found]
        assert makespans == pytest.approx(sorted(makespans))
        assert all(peak > memory for _, peak in ranking.over)
        assert len(ranking.found) + len(ranking.over) + len(ranking.refused) == len(list(candidates()))


def test_of_equals_the_one_with_less_memory_comes_first() -> None:
    ranking = search(list(candidates()), ranks=4, microbatches=8, model=Costs())
    keys = [(round(o.makespan, 9), o.peak_activations, o.copies) for _, o in ranking.found]
    assert keys == sorted(keys)
    assert len(set(keys)) < len(keys)


def test_what_is_left_out_says_why() -> None:
    tried = [Candidate("dualpipe"), Candidate("afab"), Candidate("sequential")]
    done: list[int] = []
    ranking = search(tried, ranks=3, microbatches=5, model=Costs(), peak_activations=3, progress=done.append)
    assert [str(candidate) for candidate, _ in ranking.found] == ["sequential"]
    assert ranking.over == ((Candidate("afab"), 5.0),)
    assert ranking.refused == (
        (Candidate("dualpipe"), "dualpipe over 3 ranks; allowed: an even number, nearest 2 or 4"),
    )
    assert done == [1, 2, 3]


def test_what_is_given_is_not_varied() -> None:
    names = [str(candidate) for candidate in candidates(chunks=[2], extra_warmup=[1])]
    assert names == ["combined_1f1b:chunks=2,extra_warmup=1", "interleaved_1f1b:chunks=2,extra_warmup=1"]
    assert str(Candidate("combined_1f1b", {"extra_warmup": 0})) == "combined_1f1b:extra_warmup=0"  # 1 by default
    assert [str(candidate) for candidate in candidates(schedules=["dualpipe"], chunks=[2])] == []


@pytest.mark.parametrize("memory", [0.0, -1.0, float("nan"), "8"])
def test_a_limit_must_be_above_zero(memory: float) -> None:
    with pytest.raises(ValueError, match=f"^peak_activations={memory!r}; allowed: more than 0$"):
        search([], ranks=1, microbatches=1, model=Costs(), peak_activations=memory)


def test_actions_know_no_overlap() -> None:
    with pytest.raises(ValueError, match=r"^overlap=3 with costs of actions; allowed: with costs of sub-ops$"):
        play(build_schedule("1f1b", microbatches=2), Costs(), 3)


NODES = NodeCosts.uniform(attention=3, experts=4, dispatch=5, send=1)


def test_nodes_are_searched_over_overlaps() -> None:
    model = NodeModel(NODES, layers=2)
    tried = list(candidates(schedules=["1f1b", "combined_1f1b"], chunks=[1, 2, 3], extra_warmup=[0], overlaps=OVERLAPS))
    ranking = search(tried, ranks=2, microbatches=3, model=model)
    ends = []
    for c in (c for c in tried if c.options["chunks"] <= 2 and c.overlap == 3):
        program = build_schedule(c.schedule, ranks=2, microbatches=3, **c.options)
        ends.append(simulate(program, NODES, overlap=3, layers=2 // c.options["chunks"]).makespan)
    assert ranking.found[0][1].makespan == pytest.approx(min(ends))
    assert {c.overlap for c, _ in ranking.found} == {"serial", "pairs", 2, 3}
    assert {why for c, why in ranking.refused if c.options["chunks"] == 3} == {
        "layers=2 over 3 chunks; allowed: a multiple of 3"
    }
    limit = ranking.found[0][1].peak_activations - 0.5
    within = search(tried, ranks=2, microbatches=3, model=model, peak_activations=limit)
    assert [c for c, _ in within.found] == [c for c, o in ranking.found if o.peak_activations <= limit]


@given(
    st.sampled_from([(1, 3), (2, 4)]),
    st.integers(0, 30),
    st.integers(0, 8),
    st.sampled_from([1, 2, 5]),
    st.sampled_from([None, 2.0, 3.0]),
)
@settings(deadline=None, max_examples=3)
def test_pruning_changes_nothing_among_the_first(
    sizes: tuple[int, int], dispatch: int, send: int, top: int, memory: float | None
) -> None:
    ranks, microbatches = sizes
    model = NodeModel(NodeCosts.uniform(attention=3, experts=4, dispatch=dispatch, send=send), 2)
    schedules = ["sequential", "1f1b", "combined_1f1b", "zb_v", "dualpipe"]
    tried = list(candidates(schedules=schedules, chunks=[1, 2], extra_warmup=[0], overlaps=("serial", 2)))
    done: list[int] = []
    sizes_and_limit: dict[str, Any] = {"ranks": ranks, "microbatches": microbatches, "peak_activations": memory}
    whole = search(tried, model=model, **sizes_and_limit)
    pruned = search(tried, model=model, top=top, progress=done.append, **sizes_and_limit)
    assert pruned.found[:top] == whole.found[:top]
    assert set(pruned.found) <= set(whole.found)
    assert not whole.pruned
    makespans = {candidate: outcome.makespan for candidate, outcome in whole.found}
    for candidate, least in pruned.pruned:
        assert least <= makespans.get(candidate, float("inf"))  # those over the memory limit are in neither
        assert least > pruned.found[top - 1][1].makespan
    assert sum(map(len, (pruned.found, pruned.over, pruned.refused, pruned.pruned))) == len(tried)
    assert done == list(range(1, len(tried) + 1))


def test_pruning_leaves_most_unplayed() -> None:
    model = NodeModel(NODES, layers=2)
    tried = list(candidates(chunks=[1, 2], extra_warmup=[0], overlaps=("serial", "pairs", 2)))
    ranking = search(tried, ranks=2, microbatches=4, model=model, top=1)
    assert len(ranking.pruned) > len(tried) / 2
    assert {candidate for candidate, _ in ranking.pruned} >= {Candidate("sequential", {"chunks": 1}, overlap="serial")}


def test_an_order_that_is_found_is_not_pruned_by_another_order() -> None:
    model = NodeModel(NodeCosts.uniform(attention=3, experts=4, dispatch=5), layers=2, seconds=0.001)
    tried = [Candidate("auto", {"chunks": 2}), Candidate("combined_1f1b", {"chunks": 2, "extra_warmup": 2}, overlap=2)]
    sizes: dict[str, Any] = {"ranks": 2, "microbatches": 4, "model": model}
    with patch("overlap1f1b.plan.search.OVERLAP", 1):  # of the fixed schedules beside
        ranking, whole = search(tried, top=1, **sizes), search(tried, **sizes)
    assert ranking.found[0] == whole.found[0]
    assert ranking.found[0][0].schedule == "auto"


def test_actions_are_all_played() -> None:
    tried = list(candidates())
    ranking = search(tried, ranks=4, microbatches=8, model=Costs(), top=1)
    assert ranking == search(tried, ranks=4, microbatches=8, model=Costs())
    with pytest.raises(ValueError, match=r"^top=0; allowed: 1 or more$"):
        search(tried, ranks=4, microbatches=8, model=Costs(), top=0)


def test_a_rank_keeps_its_layers_whatever_its_chunks() -> None:
    model = NodeModel(NODES, layers=4)
    for name, chunks in (("1f1b", 1), ("combined_1f1b", 2), ("zb_v", None), ("dualpipe", None)):
        timeline = model.play(build_schedule(name, ranks=2, microbatches=4, chunks=chunks), "serial")
        assert [timeline.busy(rank) for rank in (0, 1)] == [4 * 4 * 21, 4 * 4 * 21], name


@pytest.mark.parametrize("name", SCHEDULES)
def test_figures(name: str) -> None:
    program = build_schedule(name, ranks=4, microbatches=8)
    timeline = simulate(program, Costs(forward=1.5, backward=2, weight=0.5, pair=0.75))
    outcome = Outcome.of(program, timeline)
    assert outcome.makespan == timeline.makespan
    assert outcome.peak_activations == max(program.peak_activations) * program.placement.share
    assert outcome.bubble_share == pytest.approx(1 - sum(map(timeline.busy, range(4))) / (4 * timeline.makespan))
    assert outcome.copies == (2 if name == "dualpipe" else 1)
