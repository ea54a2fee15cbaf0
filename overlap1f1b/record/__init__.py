"""Room ``record``: the nodes of an engine's steps, in a profiler's trace and in files of its own."""

from overlap1f1b.record.profile import Profile
from overlap1f1b.record.recorder import Recorder

__all__ = ["Profile", "Recorder"]
