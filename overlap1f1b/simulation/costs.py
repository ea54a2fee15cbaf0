"""How long each action takes."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

from overlap1f1b.schedule import Kind, Pair, Slot


@dataclass(frozen=True)
class Costs:
    """Costs of actions, in any one unit of time, for a rank's whole share of the model and one microbatch.

    A stage that is one of v chunks of its rank costs 1/v of them.

    >>> Costs(forward=1, backward=2, weight=1).of(Pair.parse("(0F1;0B0)OVERLAP_F_B"))
    3.0

    Args:
        forward: F.
        backward: B, input and weight gradients together.
        weight: W, the part of B that computes weight gradients; the input gradient takes ``backward − weight``.
        pair: What a fused pair takes as a part of the sum of its members: F&B / (F+B).
        send: Time of one transfer between two ranks; transfers from one rank to another go one after the other.
        activation: Memory of the activations of one microbatch on a rank, in any unit.
        held: Part of it that is kept between I and W.

    Raises:
        ValueError: A cost that is no number, not finite, negative, or zero where something must take time.
    """

    forward: float = 1.0
    backward: float = 2.0
    weight: float = 1.0
    pair: float = 1.0
    send: float = 0.0
    activation: float = 1.0
    held: float = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, Real):
                raise ValueError(f"{name}={value!r}; allowed: a number")
        for name in ("forward", "backward", "pair"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)}; allowed: a finite number > 0")
        for name in ("weight", "send", "activation"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)}; allowed: a finite number ≥ 0")
        if self.weight >= self.backward:
            raise ValueError(
                f"weight={self.weight} with backward={self.backward}, which it is a part of; "
                f"allowed: from 0 to below {self.backward}"
            )
        if not 0 <= self.held <= 1:
            raise ValueError(f"held={self.held}; allowed: a part of the activations, 0 to 1")

    def of(self, slot: Slot, share: float = 1.0) -> float:
        """The time of an action or pair on a stage that is a given part of a rank's share."""
        if isinstance(slot, Pair):
            return self.pair * (self.of(slot.forward, share) + self.of(slot.backward, share))
        whole = {Kind.F: self.forward, Kind.B: self.backward, Kind.I: self.backward - self.weight, Kind.W: self.weight}
        return share * whole[slot.kind]
