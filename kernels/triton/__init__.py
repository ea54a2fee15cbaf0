"""Triton kernels, each beside its torch twin of the same module and name in the folder above, which documents it.

Imported only where one is to run. Common to all: places of rows are int64, −1 stands for none, every size may be 0, a
program handles a tile of rows and columns, and tails are masked. Sizes divisible by 16 are seen as such by Triton, so
that loads and stores along a row are 16 bytes a thread.
"""
