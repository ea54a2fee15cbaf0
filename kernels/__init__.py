"""Kernels for mixtures of experts. Each file holds one kind of op with its backward and its autograd Function.

The Functions of permutations and sums stand in :mod:`overlap1f1b.moe.experts`, since they need the route. A file here
is in torch: the twin that defines the op and serves CPUs. Its Triton kernels are in the file of the same name in
``triton/``, and :class:`~overlap1f1b.kernels.choice.Kernels` chooses. Letters in shapes are explained in
:mod:`overlap1f1b.moe`. Times called *computed* are bytes over an assumed 4.3 TB/s (H200); none is measured.
"""
