"""Floor ``profiling``: how much of the exchange a run hid, from its traces and records. Needs no torch."""

from overlap1f1b.profiling.bars import Bar, arrows, bars_of, predict, predicted_bars
from overlap1f1b.profiling.figures import Figures, Lanes, aligned, figures_of, longest
from overlap1f1b.profiling.reading import Recordings, read, read_file
from overlap1f1b.profiling.recording import Recording, StepRecord
from overlap1f1b.profiling.verdict import advice, verdict

__all__ = [
    "Bar", "Figures", "Lanes", "Recording", "Recordings", "StepRecord", "advice", "aligned", "arrows", "bars_of",
    "figures_of", "longest", "predict", "predicted_bars", "read", "read_file", "verdict",
]  # fmt: skip
