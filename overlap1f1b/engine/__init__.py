"""Room ``engine``: plays a Program over a model."""

from overlap1f1b.transport.versions import check_torch

check_torch()

from overlap1f1b.cut.blocks import MicrobatchBlock, blocks_of
from overlap1f1b.cut.declaration import declare
from overlap1f1b.cut.options import EngineOptions
from overlap1f1b.cut.places import carried
from overlap1f1b.cut.stage import Stage
from overlap1f1b.engine.capacity import CapacityOverflowError
from overlap1f1b.engine.engine import Engine
from overlap1f1b.engine.finite import NotFiniteError
from overlap1f1b.engine.gate import NotHiddenError
from overlap1f1b.engine.stages import split_blocks
from overlap1f1b.learn.check import VerificationError
from overlap1f1b.play.feed import Feed
from overlap1f1b.play.microbatch import LossFunction, Microbatch
from overlap1f1b.play.pair import combined_forward_backward_step
from overlap1f1b.play.result import StepResult
from overlap1f1b.transport.budget import DeviceOptions
from overlap1f1b.transport.failures import LostRankError

__all__ = [
    "CapacityOverflowError",
    "DeviceOptions",
    "Engine",
    "EngineOptions",
    "Feed",
    "LossFunction",
    "LostRankError",
    "Microbatch",
    "MicrobatchBlock",
    "NotFiniteError",
    "NotHiddenError",
    "Stage",
    "StepResult",
    "VerificationError",
    "blocks_of",
    "carried",
    "combined_forward_backward_step",
    "declare",
    "split_blocks",
]
