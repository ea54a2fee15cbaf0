"""Move tensors between ranks: exchanges of experts, transfers between stages, and what happens when a rank fails."""
