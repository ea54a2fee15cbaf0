"""Rows against the tables of torch.distributed.pipelining, action by action, over a grid of sizes.

Both define the same schedule for: GPipe (``afab``), Interleaved1F1B (``interleaved_1f1b``), InterleavedZeroBubble
(``zb_h1`` with chunks), ZBV (``zb_v``) and DualPipeV (``dualpipev``). Waits, which torch writes as blanks, and its
REDUCE_GRAD are left out. They differ, or only one of them is defined, here:

- Microbatches that do not fill whole rounds: torch refuses the two interleaved schedules unless ⌊M/P⌋ divides M; here
  groups are then as equal as can be.
- GPipe with chunks: torch's LoopedBFS takes the backwards of a chunk from the last microbatch to the first, ``afab``
  from the first to the last, as GPipe does.
- 1F1B: torch's table numbers the forwards of the last rank from 1 to M (of the others right), so the last row is
  compared after it has been counted from 0, and those tables with fewer microbatches than P−1 are left out, in which
  torch runs forwards that do not exist.
- zb_h2, dualpipe and the combined schedules: torch has none.
"""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from overlap1f1b.schedule import Action, Kind, Program, build_schedule
from tests.tiers import wide

schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

RANKS = (1, 2, 3, 4, 5)
MICROBATCHES = (1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 16)


def table(name: str, P: int, M: int, v: int = 1) -> Any:
    """Torch's schedule without stages or processes, its rows in ``pipeline_order``."""
    schedule = object.__new__(getattr(schedules, name))
    schedule._num_stages = schedule.num_stages = P * v
    schedule._n_microbatches, schedule.pp_group_size, schedule.n_local_stages = M, P, v
    schedule.microbatches_per_round = M // max(1, M // P)
    if name in ("ScheduleGPipe", "Schedule1F1B"):
        schedule.pipeline_order = schedule._get_pipeline_order()
    else:
        schedule.pipeline_order = {rank: schedule._calculate_single_rank_operations(rank) for rank in range(P)}
    return schedule


def theirs(name: str, P: int, M: int, v: int = 1) -> list[list[str]]:
    return texts(list(table(name, P, M, v).pipeline_order.values()))


def texts(rows: Sequence[Sequence[Any]]) -> list[list[str]]:
    return [[str(cell) for cell in row if cell is not None and "REDUCE" not in str(cell)] for row in rows]


def ours(name: str, P: int, M: int, v: int | None = None) -> list[list[str]]:
    return texts(build_schedule(name, ranks=P, microbatches=M, chunks=v).ranks)


@pytest.mark.parametrize("P", RANKS)
@pytest.mark.parametrize(
    ("name", "torchs", "v"),
    [
        ("afab", "ScheduleGPipe", 1),
        *(("interleaved_1f1b", "ScheduleInterleaved1F1B", v) for v in (1, 2, 3)),
        *(("zb_h1", "ScheduleInterleavedZeroBubble", v) for v in (1, 2, 3)),
        ("zb_v", "ScheduleZBVZeroBubble", 2),
        ("dualpipev", "ScheduleDualPipeV", 2),
    ],
)
def test_rows(name: str, torchs: str, v: int, P: int) -> None:
    defined = [M for M in MICROBATCHES if "Interleaved" not in torchs or M % max(1, M // P) == 0]
    defined = [M for M in defined if name != "dualpipev" or M >= 2 * P]
    assert len(defined) > 2
    for M in defined:
        assert ours(name, P, M, v) == theirs(torchs, P, M, v), M


@pytest.mark.parametrize("P", RANKS)
def test_1f1b_but_for_the_count_of_the_last_rank(P: int) -> None:
    for M in [M for M in MICROBATCHES if M >= P - 1]:
        rows = theirs("Schedule1F1B", P, M)
        rows[-1] = [counted_from_zero(text) for text in rows[-1]]
        assert ours("1f1b", P, M) == rows


def counted_from_zero(text: str) -> str:
    action = Action.parse(text)
    return str(action._replace(microbatch=action.microbatch - 1) if action.kind is Kind.F else action)


@pytest.mark.parametrize(
    ("name", "torchs"), [("zb_v", "ScheduleZBVZeroBubble"), *wide(("dualpipev", "ScheduleDualPipeV"))]
)
def test_tables_that_torch_has_written(name: str, torchs: str, tmp_path: Path) -> None:
    P, M = 3, 8
    path = tmp_path / f"{name}.csv"
    schedules.PipelineScheduleMulti._dump_csv(table(torchs, P, M, 2), path)
    assert Program.from_csv(path) == build_schedule(name, ranks=P, microbatches=M)


def test_torch_loads_a_file_without_header(tmp_path: Path) -> None:
    program = build_schedule("dualpipev", ranks=2, microbatches=4)
    path = tmp_path / "table.csv"
    program.to_csv(path, header=False)
    with path.open(newline="") as file:
        rows = [[schedules._Action.from_str(cell) for cell in row] for row in csv.reader(file)]
    assert texts(rows) == texts(program.ranks)
    assert Program.from_csv(path).ranks == program.ranks
