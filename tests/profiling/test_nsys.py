"""Exports of nsys: tables that are missing or of another form, and several ranks in one."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from overlap1f1b.profiling import figures_of, read, read_file
from tests.profiling.cases import DEVICE, DEVICE_IDLE, device, host, refusal, summed
from tests.profiling.synthetic import Events, Range, write_nsys
from tests.tiers import wide


def changed(path: Path, *statements: str) -> Path:
    """An export, a new one or one that is there, after these statements."""
    with closing(sqlite3.connect(path)) as database, database:
        for statement in statements:
            database.execute(statement)
    return path


def test_foreign_databases(tmp_path: Path) -> None:
    path = changed(tmp_path / "other.sqlite", "CREATE TABLE people (name TEXT)")
    assert "no NVTX_EVENTS and no kernels in it" in refusal(path)
    assert "no such column" in refusal(changed(path, "CREATE TABLE NVTX_EVENTS (start INTEGER)"))


def test_an_export_with_ranges_of_others_and_no_kernels(tmp_path: Path) -> None:
    path = write_nsys(tmp_path / "others.sqlite", {1: Events([Range("forward", 0, 5)])})
    assert "has no ranges of overlap1f1b and no kernels" in refusal(path)
    write_nsys(tmp_path / "rank0.sqlite", {1: device(0)})
    found = read(tmp_path)
    assert (len(found.ranks), len(found.left_out)) == (1, 1)


def test_graphs_as_a_whole_are_said_to_be_left_out(tmp_path: Path) -> None:
    path = changed(
        write_nsys(tmp_path / "graphs.sqlite", {1: device()}),
        "CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INTEGER, end INTEGER, globalPid INTEGER)",
        f"INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (1, 2, {1 << 24})",
    )
    (recording,) = read_file(path)
    assert "1 launches of graphs are in the file as a whole, and left out" in recording.notes[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL DROP COLUMN globalPid", "no such column: t.globalPid"),
        *wide(("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 'noon'", "a row is malformed")),
    ],
)
def test_an_export_of_another_form(tmp_path: Path, change: str, message: str) -> None:
    assert message in refusal(changed(write_nsys(tmp_path / "other.sqlite", {1: device()}), change))


def test_texts_among_the_strings_and_ranges_of_no_thread(tmp_path: Path) -> None:
    path = changed(
        write_nsys(tmp_path / "registered.sqlite", {1: device()}),
        "INSERT INTO NVTX_EVENTS (start, end, eventType, text) VALUES (0, 9, 59, 'o1 rank 5: ep 0/9')",
        "INSERT INTO StringIds (value) SELECT DISTINCT text FROM NVTX_EVENTS WHERE text IS NOT NULL "
        "AND text NOT IN (SELECT value FROM StringIds)",
        "UPDATE NVTX_EVENTS SET textId = (SELECT id FROM StringIds WHERE value = text), text = NULL "
        "WHERE text IS NOT NULL",
    )
    (recording,) = read_file(path)
    assert (recording.rank, len(recording.steps[0].issued)) == (0, 7)


def test_tables_that_nsys_did_not_create(tmp_path: Path) -> None:
    dropped = [f"DROP TABLE CUPTI_ACTIVITY_KIND_{table}" for table in ("KERNEL", "MEMCPY", "RUNTIME")]
    (recording,) = read_file(changed(write_nsys(tmp_path / "host.sqlite", {1: host()}), *dropped))
    assert not recording.device
    assert len(recording.steps[0].issued) == 7


def test_a_label_that_was_still_open(tmp_path: Path) -> None:
    path = write_nsys(tmp_path / "open.sqlite", {1: device(3)})
    (recording,) = read_file(changed(path, "UPDATE NVTX_EVENTS SET end = NULL WHERE text LIKE 'o1 rank %'"))
    assert (recording.rank, len(recording.steps)) == (3, 1)


def test_ranks_of_one_export(tmp_path: Path) -> None:
    """Whatever their clocks say."""
    launcher = Events([Range("not of ours", 0, 5)], [])
    path = write_nsys(tmp_path / "both.sqlite", {5: launcher, 7: device(0), 8: device(1).shifted(10**9)})
    recordings = read(path)
    assert [recording.rank for recording in recordings.ranks] == [0, 1]
    assert [summed(recording) for recording in recordings.ranks] == [DEVICE, DEVICE]
    assert [figures_of(recording).idle for recording in recordings.ranks] == [DEVICE_IDLE, DEVICE_IDLE]
    assert not recordings.partial
