"""Schedules against their pictures, and every refusal with its numbers."""

from __future__ import annotations

from typing import Any

import pytest

from overlap1f1b.schedule import DEFAULT_PROGRAM, SCHEDULES, build_schedule


@pytest.mark.parametrize(
    ("name", "extra_warmup", "microbatches", "text"),
    [
        ("sequential", None, 7, "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6"),
        ("combined_1f1b", 0, 7, "F0 B0‖F1 B1‖F2 B2‖F3 B3‖F4 B4‖F5 B5‖F6 B6"),
        ("combined_1f1b", 1, 2, "F0 F1 B0 B1"),
        ("combined_1f1b", 1, 4, "F0 F1 B0‖F2 B1‖F3 B2 B3"),
        ("combined_1f1b", 3, 2, "F0 F1 B0 B1"),
        ("combined_1f1b", 3, 7, "F0 F1 F2 F3 B0‖F4 B1‖F5 B2‖F6 B3 B4 B5 B6"),
    ],
)
def test_pictures(name: str, extra_warmup: int | None, microbatches: int, text: str) -> None:
    program = build_schedule(name, microbatches=microbatches, extra_warmup=extra_warmup)
    assert program.draw() == f"rank 0: {text}"
    program.check()


def test_names_and_defaults() -> None:
    assert build_schedule("DualPipeV", ranks=2, microbatches=4).name == "dualpipev"
    assert DEFAULT_PROGRAM in SCHEDULES
    assert build_schedule("combined_1f1b", microbatches=4, extra_warmup=0).name == "combined_1f1b"
    assert build_schedule("1f1b", microbatches=4, ranks=2, extra_warmup=5).name == "1f1b+5"
    default = build_schedule("combined_1f1b", microbatches=4)
    assert default.name == "combined_1f1b+1"
    assert default == build_schedule("combined_1f1b", microbatches=4, extra_warmup=1)
    assert build_schedule("sequential", microbatches=4, extra_warmup=0).name == "sequential"
    assert not default.forward_only


@pytest.mark.parametrize(
    ("name", "microbatches", "ranks", "options", "message"),
    [
        ("dualpip", 4, 1, {}, "unknown schedule 'dualpip'; allowed: .*; nearest: dualpipe"),
        ("zigzag", 4, 1, {}, "unknown schedule 'zigzag'; allowed: sequential, combined_1f1b"),
        ("combined_1f1b", 4, 0, {}, "ranks=0; allowed: 1 or more"),
        ("combined_1f1b", 4, 1, {"chunks": 0}, "chunks=0; allowed: 1 or more"),
        ("zb_h2", 4, 1, {"chunks": 2}, r"chunks=2 with zb_h2; allowed: 1 \(chunks is an option of sequential, "),
        ("zb_v", 4, 1, {"chunks": 3}, "chunks=3 with zb_v; allowed: 2"),
        ("dualpipev", 4, 1, {"chunks": 1}, "chunks=1 with dualpipev; allowed: 2"),
        ("1f1b", 4, 1, {"group_size": 2}, "group_size=2 with 1f1b; allowed: extra_warmup .group_size is an option"),
        (
            "interleaved_1f1b",
            8,
            4,
            {"chunks": 2, "group_size": 3},
            "group_size=3 over 4 ranks with 8 microbatches; allowed: 4 to 8 with a last group of 4 or more, nearest 4",
        ),
        (
            "zb_h1",
            3,
            4,
            {"chunks": 2, "group_size": 9},
            "group_size=9 over 4 ranks with 3 microbatches; allowed: 3, all in one group",
        ),
        (
            "combined_1f1b",
            13,
            4,
            {"chunks": 3, "group_size": 6},
            "group_size=6 over 4 ranks with 13 microbatches; allowed: 7 to 13 .* of 4 or more, nearest 7",
        ),
        ("dualpipe", 8, 3, {}, "dualpipe over 3 ranks; allowed: an even number, nearest 2 or 4"),
        ("dualpipe", 6, 4, {}, "over 4 ranks with 6 microbatches; allowed: an even number from 8 on, nearest 8"),
        ("dualpipe", 9, 4, {}, "9 microbatches; allowed: .* from 8 on, nearest 8 or 10"),
        ("dualpipev", 7, 4, {}, "over 4 ranks with 7 microbatches; allowed: 8 or more"),
        ("1f1b", 2.5, 1, {}, "^microbatches=2.5; allowed: a whole number, 1 or more$"),
        ("1f1b", 2, "2", {}, "^ranks='2'; allowed: a whole number, 1 or more$"),
        ("zb_h1", 2, 1, {"group_size": 1.5}, "^group_size=1.5; allowed: a whole number, 1 or more$"),
        ("combined_1f1b", 0, 1, {}, "microbatches=0; allowed: 1 or more"),
        ("combined_1f1b", 4, 1, {"extra_warmup": -1}, "extra_warmup=-1; allowed: 0 or more"),
        ("sequential", 4, 1, {"extra_warmup": 2}, "extra_warmup=2 with sequential; allowed: 0"),
    ],
)
def test_refusals_name_the_numbers(
    name: str, microbatches: int, ranks: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_schedule(name, microbatches=microbatches, ranks=ranks, **options)
