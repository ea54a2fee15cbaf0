"""Tensors between ranks: exchanges of experts, transfers between stages, and the handling of failed ranks."""
