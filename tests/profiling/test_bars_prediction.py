"""A step played from its own times gives itself."""

from pathlib import Path

import pytest

from overlap1f1b.plan import Overlap
from overlap1f1b.profiling import predict, read
from tests.profiling.cases import device
from tests.profiling.simulated import simulated, write_run
from tests.profiling.synthetic import Events, write_chrome
from tests.tiers import wide


@pytest.mark.parametrize(
    ("schedule", "overlap", "ranks"),
    [
        ("1f1b", "serial", 2),
        *wide(("combined_1f1b", 3, 2), ("dualpipe", 3, 2), ("dualpipev", 2, 2), ("sequential", 3, 1)),
    ],
)
def test_a_simulated_run_is_predicted_exactly(tmp_path: Path, schedule: str, overlap: Overlap, ranks: int) -> None:
    timeline = simulated(schedule, overlap, ranks=ranks, microbatches=2 * ranks)
    predicted = predict(read(write_run(tmp_path / "run", timeline, steps=2, experts=2)).ranks, 2)
    assert sorted(predicted) == list(range(2 * ranks))
    for rank, played in predicted.items():
        expected = timeline.ranks[rank // 2]
        assert [span.node for span in played.spans] == [span.node for span in expected.spans]
        assert played.makespan == pytest.approx(expected.makespan, abs=1e-4)
        assert played.exposed == pytest.approx(expected.exposed, abs=1e-4)


def test_what_cannot_be_predicted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", simulated("1f1b", "serial"))
    with pytest.raises(ValueError, match="no file of pipeline rank 0, so nothing can be predicted"):
        predict(read(folder / "rank1.json").ranks, 1)
    with pytest.raises(ValueError, match="has no ranges of step 7"):
        predict(read(folder).ranks, 7)
    bare = write_chrome(tmp_path / "bare.json", Events([], device().kernels))
    with pytest.raises(ValueError, match="has no ranges of step 0"):
        predict(read(bare).ranks, 0)
    half = write_chrome(tmp_path / "half.json", device())  # its receive has no partner, and a backward is missing
    with pytest.raises(ValueError, match="not a whole step"):
        predict(read(half).ranks, 4)
