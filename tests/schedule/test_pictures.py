"""The pictures in docstrings are the rows that the generators make."""

from __future__ import annotations

import re
from contextlib import nullcontext
from itertools import product

import pytest

from overlap1f1b.schedule import build_schedule
from overlap1f1b.schedule.generators.registry import BY_NAME

ROW = re.compile(r"^ *rank \d+: (.*)$", re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "microbatches", "ranks", "options"),
    [
        ("afab", 4, 2, {}),
        ("1f1b", 6, 4, {}),
        ("interleaved_1f1b", 4, 2, {"chunks": 2}),
        ("combined_1f1b", 6, 3, {"extra_warmup": 0}),
        ("zb_h1", 5, 3, {}),
        ("zb_h2", 7, 3, {}),
        ("zb_v", 4, 2, {}),
        ("dualpipe", 4, 2, {}),
        ("dualpipev", 4, 2, {}),
    ],
)
def test_pictures(name: str, microbatches: int, ranks: int, options: dict[str, int]) -> None:
    program = build_schedule(name, ranks=ranks, microbatches=microbatches, **options)
    drawn = ROW.findall(BY_NAME[name].__doc__ or "")
    rows = ROW.findall(program.draw())
    if max(len(program.placement.places(rank)) for rank in range(ranks)) == 1:
        rows = [re.sub(r"\d+'*(?=[FBIW])", "", row) for row in rows]
    assert [" ".join(row.split()) for row in drawn] == rows


@pytest.mark.parametrize(
    "name", ["sequential", "afab", "1f1b", "interleaved_1f1b", "combined_1f1b", "dualpipe", "zb_v"]
)
def test_forward_only_forms(name: str) -> None:
    whole = build_schedule(name, ranks=4, microbatches=8)
    program = build_schedule(name, ranks=4, microbatches=8, forward_only=True)
    program.check()
    assert program.forward_only
    assert program.placement == whole.placement
    for rank in range(4):
        forwards = [action for action in whole.actions(rank) if action.kind.value == "F"]
        assert list(program.actions(rank)) == forwards


def test_every_size_that_is_allowed_passes_its_checks() -> None:
    chunked = product(("sequential", "afab", "interleaved_1f1b", "combined_1f1b", "zb_h1"), (1, 2, 3))
    names = [*chunked, ("1f1b", None), ("zb_h2", None), ("zb_v", None)]
    for (name, chunks), ranks, microbatches in product(names, (1, 2, 3, 5), (1, 2, 3, 5, 7, 8, 11)):
        build_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks).check()


def test_every_group_size_that_is_allowed_passes_its_checks() -> None:
    for name, ranks, microbatches in product(
        ("interleaved_1f1b", "combined_1f1b", "zb_h1"), (2, 3, 4), (2, 3, 7, 8, 13)
    ):
        for size in range(1, microbatches + 1):
            allowed = size >= min(ranks, microbatches) and (microbatches % size) in (0, *range(ranks, size))
            refused = pytest.raises(ValueError, match=f"group_size={size} over {ranks} ranks")
            with nullcontext() if allowed else refused:
                build_schedule(name, ranks=ranks, microbatches=microbatches, chunks=3, group_size=size).check()
