"""Sizes of the model of train and bench; they need neither torch nor the parser of a command line."""

from dataclasses import dataclass

from overlap1f1b.schedule.values import check_size


@dataclass(frozen=True)
class ModelOptions:
    """Sizes of the byte-level MoE transformer."""

    layers: int = 4
    """Transformer blocks."""
    hidden: int = 256
    """Hidden size."""
    heads: int = 4
    """Attention heads."""
    experts: int = 8
    """Experts of a block, over all ranks."""
    top_k: int = 2
    """Experts per token."""
    intermediate: int = 512
    """Intermediate size of an expert."""
    force_load_balance: bool = False
    """Give tokens their experts in turn, whatever the scores, so that all have the same load: for throughput alone."""
    dropout: float = 0.0
    """Dropout probability of a block's output, before it is added to the residual."""

    def check(self) -> None:
        """Raise ``ValueError`` for sizes that no model can have."""
        for name in ("layers", "hidden", "heads", "experts", "top_k", "intermediate"):
            check_size(name, getattr(self, name))
        if self.hidden % (step := 2 * self.heads):
            raise ValueError(f"hidden={self.hidden} with heads={self.heads}; allowed: multiples of {step}")
        if self.top_k > self.experts:
            raise ValueError(f"top_k={self.top_k} with experts={self.experts}; allowed: 1 to {self.experts}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout}; allowed: 0 to less than 1")
