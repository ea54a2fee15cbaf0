"""The result of a step."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from overlap1f1b.plan import Node, NodeCosts, Op
from overlap1f1b.play.microbatch import Microbatch, OptionalTensors, unwrapped
from overlap1f1b.play.player import Alive
from overlap1f1b.play.times import Times
from overlap1f1b.schedule.values import check_number
from overlap1f1b.simulation import Flown, Timeline


@dataclass(frozen=True)
class StepResult:
    """Losses, outputs and times of a step on this rank.

    Args:
        losses: Loss of each microbatch that ended on this rank, in their order.
        shares: Share of each microbatch in the mean over all ranks.
        outputs: Arguments of each loss that the last block returned, if ``return_outputs`` was set.
        times: Times of the nodes.
        peak_activations: Most microbatches of a stage that were alive at once.
        peak_held: The same, counting microbatches that wait for weight gradients alone.
        peak_bytes: Most bytes of tensors at once, beyond those at the step's start; None unless the step has
            counted what nodes hold.
        standing: A line about each exchange of the model's own that runs where it stands, inside a node: it is exposed,
            and nothing has timed it.
        costs: Of the nodes by which the plan was made, in seconds; None if it was made by none.
        others: What the other ranks that share experts saw of the exchanges; empty if they did not pool it.
    """

    losses: tuple[Tensor, ...]
    shares: tuple[float, ...]
    outputs: tuple[Tensor | OptionalTensors | None, ...]
    times: Times
    peak_activations: int
    peak_held: int
    peak_bytes: int | None = None
    standing: tuple[str, ...] = ()
    costs: NodeCosts | None = None
    others: tuple[Mapping[Node, Flown], ...] = ()

    @cached_property
    def overlap(self) -> Timeline:
        """The measured Timeline, in seconds: ``overlap.exposed``, ``overlap.hidden_fraction``, ``overlap.by_cause``.

        On a GPU it has the device's times, and the first access waits for the device. Where exchanges run where they
        stand, both are NaN, for "not measured", and ``overlap.standing`` says which, and what would hide them.
        """
        bytes = {flight.node: (flight.sent, flight.received) for flight in self.times.flights}
        return Timeline(self.times.spans(), standing=self.standing, bytes=bytes, costs=self.costs, others=self.others)

    def pooled(self, costs: NodeCosts | None, others: tuple[Mapping[Node, Flown], ...]) -> StepResult:
        """Return the same with the costs of its plan, and what the other ranks that share experts saw."""
        found = replace(self, costs=costs, others=others)
        vars(found)["overlap"] = self.overlap.pooled(costs, others)
        return found

    @property
    def loss(self) -> Tensor:
        """Mean by shares over the microbatches that ended on this rank.

        Raises:
            ValueError: None ended here: the rank does not hold the last stage. See :meth:`Engine.mean_loss`.
        """
        if not self.losses:
            raise ValueError("no microbatch ends on this rank; allowed: result.loss where the last stage is held")
        losses = torch.stack([loss.reshape(()) for loss in self.losses])
        if len(set(self.shares)) == 1:
            return losses.mean()
        shares = losses.new_tensor(self.shares)
        return (losses * shares).sum() / shares.sum()

    def metrics(self, tokens: int | None = None) -> dict[str, float]:
        """Return this rank's figures of the step by name, as loggers of runs take them; waits for the device.

        >>> wandb.log(result.metrics(tokens=inputs.numel()), step=step)

        loss: Where the last stage is held.
        step_ms, tokens_per_s: From the first node's start to the last one's end; with the ``tokens`` of the step.
        hidden_fraction, exposed_ms: Where rows are exchanged. NaN, with a warning, if exchanges run where they stand.
        exposed_ms/dispatch.f: What is exposed of this sub-op and direction; and so on.
        exposed_by_cause_ms/link: By cause; they add up to ``exposed_ms``. Of steps that ranks pool.
        rows_over_mean/s0.b3: Of a block with experts, rows of the rank with most over the mean; of the same steps.
        offloaded_bytes: Where activations go to host memory.
        peak_bytes: If they were counted.
        """
        if tokens is not None:
            check_number("tokens", tokens)
        overlap = self.overlap
        for line in overlap.standing:
            warnings.warn(f"hidden_fraction is not measured: {line}", stacklevel=2)
        found = {"loss": float(self.loss.detach())} if self.losses else {}
        found["step_ms"] = 1e3 * overlap.makespan
        if tokens is not None and overlap.makespan:
            found["tokens_per_s"] = tokens / overlap.makespan
        if overlap.exchange:  # NaN, too
            found |= {"hidden_fraction": overlap.hidden_fraction, "exposed_ms": 1e3 * overlap.exposed}
            found |= {f"exposed_ms/{name}": 1e3 * of.exposed for name, of in overlap.by_exchange().items()}
        if self.others and overlap.exchange:
            found |= {f"exposed_by_cause_ms/{cause}": 1e3 * time for cause, time in overlap.by_cause.items()}
            crowding = overlap.causes.crowding.items()
            found |= {f"rows_over_mean/s{stage}.b{block}": ratio for (stage, block), ratio in crowding}
        if leaving := [flight.sent for flight in self.times.flights if flight.node.op is Op.OFFLOAD]:
            found["offloaded_bytes"] = sum(leaving)
        return found if self.peak_bytes is None else found | {"peak_bytes": self.peak_bytes}


def result_of(ended: Sequence[Microbatch], shares: Sequence[float], times: Times, alive: Alive) -> StepResult:
    """Return the result of a step that was played, with the microbatches that ended on this rank."""
    losses = tuple(outputs[0] for m in ended if (outputs := m.outputs) is not None)
    assert len(losses) == len(ended)
    # Under ``loss_parallel`` a loss is a DTensor; all ranks get the whole.
    losses = tuple(loss.full_tensor() if isinstance(loss, DTensor) else loss for loss in losses)
    kept = tuple(unwrapped(m.returned.kept) for m in ended) if any(m.objective.return_outputs for m in ended) else ()
    return StepResult(losses, tuple(shares), kept, times, alive.most, alive.most_held)
