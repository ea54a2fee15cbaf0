"""Play the nodes of a plan, and measure what they cost."""
