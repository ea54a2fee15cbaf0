"""Room ``checkpoint``: a training run on disk, on any layout of ranks."""

from overlap1f1b.checkpoint.export import consolidate
from overlap1f1b.checkpoint.load import load_checkpoint
from overlap1f1b.checkpoint.save import Saving, save_checkpoint

__all__ = ["Saving", "consolidate", "load_checkpoint", "save_checkpoint"]
