"""Checkpoints: save a training run, and resume it on any layout of ranks."""
