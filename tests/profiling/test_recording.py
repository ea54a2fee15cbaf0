"""The order in which a step was issued."""

from pathlib import Path

from overlap1f1b.profiling import read_file
from tests.profiling.synthetic import write_record


def test_a_node_that_was_not_launched_counts_from_its_departure(tmp_path: Path) -> None:
    spans = [
        ("node", "dense.f[0] m0", 0.0, 1.0),
        ("node", "dense.f[1] m0", 2.0, 3.0),
        ("flight", "receive.f[0] m0", 1.5, 4.0),
        ("flight", "dense.f[1] m0", 2.5, 4.0),
    ]
    (recording,) = read_file(write_record(tmp_path / "rank0.json", [spans]))
    order = tuple(recording.begun(recording.steps[0]))
    assert [str(node) for node in order] == ["dense.f[0] m0", "receive.f[0] m0", "dense.f[1] m0"]
    assert recording.peak_bytes is None  # nobody has counted
