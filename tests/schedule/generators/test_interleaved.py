"""Loops: one rank's combined pairs, and the sizes of groups."""

from contextlib import nullcontext
from itertools import product

import pytest

from overlap1f1b.schedule import build_schedule


@pytest.mark.parametrize(
    ("extra_warmup", "microbatches", "text"),
    [
        (0, 7, "F0 B0‖F1 B1‖F2 B2‖F3 B3‖F4 B4‖F5 B5‖F6 B6"),
        (1, 2, "F0 F1 B0 B1"),
        (3, 2, "F0 F1 B0 B1"),
        (3, 7, "F0 F1 F2 F3 B0‖F4 B1‖F5 B2‖F6 B3 B4 B5 B6"),
    ],
)
def test_combined_on_one_rank(extra_warmup: int, microbatches: int, text: str) -> None:
    program = build_schedule("combined_1f1b", microbatches=microbatches, extra_warmup=extra_warmup)
    assert program.draw() == f"rank 0: {text}"
    program.check()


def test_names_and_defaults() -> None:
    assert build_schedule("combined_1f1b", microbatches=4, extra_warmup=0).name == "combined_1f1b"
    assert build_schedule("1f1b", microbatches=4, ranks=2, extra_warmup=5).name == "1f1b+5"
    default = build_schedule("combined_1f1b", microbatches=4)
    assert default.name == "combined_1f1b+1"
    assert default == build_schedule("combined_1f1b", microbatches=4, extra_warmup=1)


def test_every_group_size_that_is_allowed_passes_its_checks() -> None:
    for name, ranks, microbatches in product(
        ("interleaved_1f1b", "combined_1f1b", "zb_h1"), (2, 3, 4), (2, 3, 7, 8, 13)
    ):
        for size in range(1, microbatches + 1):
            allowed = size >= min(ranks, microbatches) and (microbatches % size) in (0, *range(ranks, size))
            refused = pytest.raises(ValueError, match=f"group_size={size} over {ranks} ranks")
            with nullcontext() if allowed else refused:
                build_schedule(name, ranks=ranks, microbatches=microbatches, chunks=3, group_size=size).check()
