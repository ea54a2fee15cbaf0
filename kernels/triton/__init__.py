"""Triton kernels, each beside its torch twin of the same module and name in the folder above, which documents it.

Imported only where one is to run. Common to all: places of rows are int64, −1 stands for none, every size may be 0, a
program handles a tile of rows and columns, and tails are masked. The width of rows is a constant of a compiled kernel:
what divides it tells how many bytes a thread may move at once, 16 where rows begin at multiples of that.
"""
