"""Triton kernels. The torch twin of the same module and name in the folder above documents each.

A module is imported when one of its kernels runs first. In all kernels, row numbers are int64, −1 stands for no row,
every size may be 0, a program handles a tile of rows and columns, and tails are masked. The width of rows is a constant
of a compiled kernel: its divisors give the number of bytes that a thread may move at once, 16 if rows begin at
multiples of 16. Numbers of rows are never specialised, so that none of them makes a kernel compile again.
"""
