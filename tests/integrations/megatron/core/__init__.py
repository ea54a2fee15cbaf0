"""Megatron-Core itself on CPUs over gloo: patches, models, and steps by its own schedules and by this project's."""
