"""Floor ``engine``: plays a Program over a model."""

from overlap1f1b.engine.engine import DEFAULT_OVERLAP, Engine, StepResult
from overlap1f1b.engine.microbatch import LossFunction, Microbatch
from overlap1f1b.engine.stage import Stage

__all__ = ["DEFAULT_OVERLAP", "Engine", "LossFunction", "Microbatch", "Stage", "StepResult"]
