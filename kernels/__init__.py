"""Kernels of the MoE floor. Each file holds one op, forward and backward, and the autograd Function that joins them;
of permutations and sums that Function is where the route is known, in :mod:`overlap1f1b.moe.experts`.

A file here is torch: the twin that defines the op and serves CPUs. Its Triton kernels stand in the file of that name in
``triton/``, and :class:`~overlap1f1b.kernels.choice.Kernels` chooses. Letters in shapes are those of
:mod:`overlap1f1b.moe`. Times called *computed* are bytes over an assumed 4.3 TB/s (H200); none is measured.
"""
