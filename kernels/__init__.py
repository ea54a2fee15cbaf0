"""Kernels of the MoE floor. Each file holds one op: forward, backward, and the autograd Function that joins them."""
