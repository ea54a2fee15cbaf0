"""Beside Holistic Trace Analysis, where that is installed (pip install HolisticTraceAnalysis).

It tells exchange from compute by the names of kernels, and calls overlap the share of the exchange's time in which a
compute kernel runs: the same as hidden_fraction, in per cent.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from overlap1f1b.profiling import figures_of, read
from tests.profiling.synthetic import COMPUTE, EXCHANGE, Events, Kernel, Range, write_chrome

analysis = pytest.importorskip("hta.trace_analysis", reason="compares with HolisticTraceAnalysis, if it is installed")


def random_step(rank: int, seed: int) -> Events:
    """Exchanges on two streams beside compute on another, with gaps."""
    chance = random.Random(seed)
    ranges = [Range(f"o1 rank {rank}: ep {rank}/2", 0, 10**7), Range("o1 step 1", 1000, 10**6)]
    kernels = []
    at, free = 2000, {COMPUTE: 10_000, EXCHANGE: 12_000, EXCHANGE + 1: 15_000}
    for microbatch in range(40):
        for op, stream, name in (
            ("attention.f", COMPUTE, "gemm_bf16"),
            ("dispatch.f", EXCHANGE, "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"),
            ("experts.f", COMPUTE, "gemm_bf16"),
            ("combine.f", EXCHANGE + 1, "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"),
        ):
            ranges.append(Range(f"o1 {op}[0] m{microbatch}", at, at + 900))
            for launch in range(3):
                start = free[stream] + chance.choice((0, 0, 1000, 7000))
                end = free[stream] = start + chance.randrange(1, 9) * 1000
                kernels.append(Kernel(stream, start, end, at + 100 + 200 * launch, name=name))
            at += 1000
    return Events(ranges, kernels)


def test_overlap_is_the_same(tmp_path: Path) -> None:
    for rank in range(2):
        top = {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 2}}
        write_chrome(tmp_path / f"rank{rank}.json", random_step(rank, seed=7 + rank), top=top)
    table = analysis.TraceAnalysis(trace_dir=str(tmp_path)).get_comm_comp_overlap(visualize=False)
    theirs = dict(zip(table["rank"], table["comp_comm_overlap_pctg"], strict=True))
    mine = {r.rank: 100 * figures_of(r).overlap.hidden_fraction for r in read(tmp_path).ranks}
    assert sorted(mine) == [0, 1]
    assert 5 < mine[0] < 95
    for rank, share in mine.items():
        assert theirs[rank] == pytest.approx(share, abs=0.01)  # it rounds to two decimals
