"""Room ``record``: the nodes of an engine's steps, in a profiler's trace and in files of its own."""

from overlap1f1b.record.recorder import Profile, Recorder

__all__ = ["Profile", "Recorder"]
