"""Clocks of ranks that have nothing to do with each other's."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlap1f1b.profiling import bars_of, read
from overlap1f1b.profiling.bars import arrows
from overlap1f1b.profiling.clocks import offsets
from tests.profiling.cases import device
from tests.profiling.synthetic import Events, Range, write_chrome


@pytest.mark.parametrize("skew", [0, 7, -(10**13)])
def test_ranks_that_share_experts(tmp_path: Path, skew: int) -> None:
    write_chrome(tmp_path / "a.json", device(0))
    write_chrome(tmp_path / "b.json", device(1).shifted(skew))
    steps = [(recording, recording.steps[0]) for recording in read(tmp_path).ranks]
    assert offsets(steps) == [-1, -1 - skew]


def test_pipeline_ranks_meet_where_they_send(tmp_path: Path) -> None:
    """Records count from each rank's own start; what one sends and the other receives brings them together."""
    send = [Range("o1 step 1", 0, 100), Range("o1 dense.f[0] m0", 0, 30), Range("o1 flight send.f[0] m0", 30, 50, 5)]
    receive = [
        Range("o1 rank 1: pp 1/2", 1000, 1100),
        Range("o1 step 1", 1000, 1100),
        Range("o1 flight receive.f[0] m0 s1", 1000, 1010, 5),
        Range("o1 dense.f[0] m0 s1", 1010, 1020),
    ]
    write_chrome(tmp_path / "a.json", Events([Range("o1 rank 0: pp 0/2", 0, 100), *send]))
    write_chrome(tmp_path / "b.json", Events(receive))
    ranks = read(tmp_path).ranks
    assert offsets([(recording, recording.steps[0]) for recording in ranks]) == [0, -960]
    bars = bars_of(ranks, 1)
    ends = {str(bar.what): round(bar.end * 1e6) for bar in bars}
    assert ends["send.f[0] m0"] == ends["receive.f[0] m0 s1"] == 50
    assert [(str(a.what), str(b.what)) for a, b in arrows(bars)] == [
        ("receive.f[0] m0 s1", "dense.f[0] m0 s1"),
        ("send.f[0] m0", "receive.f[0] m0 s1"),
    ]


def test_ranks_with_nothing_in_common_begin_together(tmp_path: Path) -> None:
    def alone(rank: int) -> list[Range]:
        return [
            Range(f"o1 rank {rank}: dp {rank}/2, ep 0/1", 0, 99),
            Range("o1 step 1", 5, 99),
            Range("o1 dense.f[0] m0", 10 * (1 + rank), 90),
        ]

    write_chrome(tmp_path / "a.json", Events(alone(0)))
    write_chrome(tmp_path / "b.json", Events(alone(1)).shifted(12345))
    assert offsets([(recording, recording.steps[0]) for recording in read(tmp_path).ranks]) == [-5, -12350]
