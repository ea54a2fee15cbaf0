"""Engines on NCCL, whose ranks may all be on one GPU. Without a GPU `tests/device` plays them; these are skipped."""
