"""Run one block for one microbatch, forward and backward, in parts."""
