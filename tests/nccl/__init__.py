"""Engines on NCCL, whose ranks may all be on one GPU. Without a GPU these tests are skipped; `tests/device` plays them."""
