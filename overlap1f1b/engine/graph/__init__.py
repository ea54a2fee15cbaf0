"""The part of torch's graph that a segment has built: where its walk begins, and where gradients enter and leave."""
