"""Record what an engine does, as ranges in a profiler and as files."""
