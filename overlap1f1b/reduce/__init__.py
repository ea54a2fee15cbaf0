"""Room ``reduce``: sums of gradients over ranks, which live as long as their engine."""
