"""Kernels for mixtures of experts. Each file holds one kind of op with its backward and its autograd Function.

The Functions of permutations and sums are in :mod:`overlap1f1b.moe.experts`, since they need the route. A file here is
written in torch: the twin, which defines the op and runs on CPUs. Its Triton kernels are in the file of the same name
in ``triton/``, and :class:`~overlap1f1b.kernels.choice.Kernels` chooses. :mod:`overlap1f1b.moe` explains the letters in
shapes. docs/kernels.md has the bytes that each op moves, and the times measured on a GPU.
"""
