"""One forward and one backward, interleaved."""
