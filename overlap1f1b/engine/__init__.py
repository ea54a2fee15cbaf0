"""Floor ``engine``: plays a Program over a model."""

from overlap1f1b.transport.versions import check_torch

check_torch()

from overlap1f1b.engine.batch import Feed
from overlap1f1b.engine.capacity import CapacityOverflowError
from overlap1f1b.engine.checkpoint.background import Saving
from overlap1f1b.engine.checkpoint.consolidate import consolidate
from overlap1f1b.engine.checkpoint.load import load_checkpoint
from overlap1f1b.engine.checkpoint.save import save_checkpoint
from overlap1f1b.engine.combined import combined_forward_backward_step
from overlap1f1b.engine.engine import Engine
from overlap1f1b.engine.foreign.declared import declare
from overlap1f1b.engine.options import EngineOptions
from overlap1f1b.engine.record.profile import Profile
from overlap1f1b.engine.record.recorder import Recorder
from overlap1f1b.engine.result import StepResult
from overlap1f1b.engine.run.attributes import carried
from overlap1f1b.engine.run.microbatch import LossFunction, Microbatch
from overlap1f1b.engine.run.model import MicrobatchBlock, blocks_of
from overlap1f1b.engine.run.stage import Stage
from overlap1f1b.engine.stages import split_blocks
from overlap1f1b.engine.verify import VerificationError
from overlap1f1b.transport.communicators import DeviceOptions
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
    "Profile",
    "Recorder",
    "Saving",
    "Stage",
    "StepResult",
    "VerificationError",
    "blocks_of",
    "carried",
    "combined_forward_backward_step",
    "consolidate",
    "declare",
    "load_checkpoint",
    "save_checkpoint",
    "split_blocks",
]
