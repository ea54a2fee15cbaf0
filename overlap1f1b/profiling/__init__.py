"""Floor ``profiling``: how much of the exchange a run hid, from what was noted of it. Needs no torch."""

from overlap1f1b.profiling.bars import Bar, arrows, bars_of, predicted_bars
from overlap1f1b.profiling.exposed import Exposed, longest
from overlap1f1b.profiling.figures import Lanes, Overlap, RankFigures, figures_of
from overlap1f1b.profiling.predicted import predict
from overlap1f1b.profiling.reading import Recordings, read, read_file
from overlap1f1b.profiling.recording import Recording, Spans, Step, Stream
from overlap1f1b.profiling.verdict import Sums, advice, verdict

__all__ = [
    "Bar",
    "Exposed",
    "Lanes",
    "Overlap",
    "RankFigures",
    "Recording",
    "Recordings",
    "Spans",
    "Step",
    "Stream",
    "Sums",
    "advice",
    "arrows",
    "bars_of",
    "figures_of",
    "longest",
    "predict",
    "predicted_bars",
    "read",
    "read_file",
    "verdict",
]
