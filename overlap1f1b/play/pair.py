"""Run one forward and one backward interleaved, without an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta

from torch import Tensor

from overlap1f1b.cut.options import check_timeout
from overlap1f1b.cut.stage import Stage
from overlap1f1b.plan import Chains, Node, NodeCosts, Overlap, parse_overlap
from overlap1f1b.plan.orders import pairs, serial
from overlap1f1b.plan.scheduler import ListScheduler, Policy
from overlap1f1b.plan.turn import turns_of
from overlap1f1b.play.install import Installation
from overlap1f1b.play.microbatch import Microbatch, OptionalTensors, Phase, check_gradients_possible, checked_tensors
from overlap1f1b.play.observers import Observers, WithoutAutocast
from overlap1f1b.play.player import Player
from overlap1f1b.play.step import settings_of_step
from overlap1f1b.play.times import Times
from overlap1f1b.reduce.links import Links, lanes_of
from overlap1f1b.schedule import Action, Kind, Pair, Placement
from overlap1f1b.schedule.values import checked
from overlap1f1b.transport.devices import watch_of
from overlap1f1b.transport.failures import Failures
from overlap1f1b.transport.limits import DEFAULT_LIMIT_S

Passed = Tensor | OptionalTensors | None
_TYPICAL = NodeCosts.uniform(attention=3.0, experts=4.0, dispatch=5.0, counts=0.3, aggregate=0.2, dense=1.0)


@checked
def combined_forward_backward_step(
    forward: Microbatch | None,
    backward: Microbatch | None,
    *,
    output_grad: Tensor | Sequence[Tensor | None] | None = None,
    overlap: Overlap = "pairs",
    timeout: float = DEFAULT_LIMIT_S,
    split: bool = False,
) -> tuple[Passed, Passed]:
    """Run the forward of one microbatch and the backward of another, each one's exchanges behind the other's compute.

    >>> stage = Stage(blocks, exchange)
    >>> previous = None
    >>> for index, (x, y) in enumerate(microbatches):
    ...     current = Microbatch(stage, x, y, index=index, loss_fn=loss_fn, loss_grad=1 / len(microbatches))
    ...     loss, _ = combined_forward_backward_step(current, previous)
    ...     previous = current
    >>> combined_forward_backward_step(None, previous)

    Gradients of parameters are added to ``.grad`` and are not summed over ranks. Backwards run on this thread. The two
    microbatches may be of different stages of this rank, which then share one exchange and have different numbers.

    Args:
        forward: Microbatch to run forward; None runs the backward alone.
        backward: Microbatch, already run forward, to run backward; None runs the forward alone.
        output_grad: Gradient of ``backward``'s output; not given if its ``loss_fn`` made a loss.
        overlap: ``"pairs"`` is Megatron-Core's order; 2 uses typical costs; ``"serial"`` keeps them apart.
        timeout: Limit in seconds of every wait for another rank.
        split: Whether the backward stops at input gradients; :meth:`Microbatch.accumulate_weights` does the rest.

    Returns:
        The forward's output (the loss, if it has a ``loss_fn``), detached, and the gradient of the backward's input,
        None if the input requires none.

    Raises:
        ValueError: Neither is given, both are the same, the gradient of the output is missing, stages that cannot be
            told apart, or a microbatch with gradients in inference mode.
    """
    if forward is None and backward is None:
        raise ValueError("neither a forward nor a backward is given; allowed: one of them or both")
    if forward is backward:
        raise ValueError(f"microbatch {forward.index if forward else 0} is given twice; allowed: two different ones")
    check_timeout(timeout)
    if backward is not None:
        if output_grad is not None:
            backward.gradients = tuple(checked_tensors("output_grad", output_grad, None))
        if backward.phase is not Phase.BACKWARD or not backward.grad:
            raise ValueError(f"microbatch {backward.index} is not between forward and backward; allowed: one that is")
        if backward.gradients is None:
            raise ValueError(f"microbatch {backward.index} has neither output_grad nor loss_fn; allowed: one of them")
    if forward is not None and (forward.phase is not Phase.FORWARD or forward.runs):
        raise ValueError(f"microbatch {forward.index} has run forward before; allowed: a new one")
    if any(microbatch is not None and microbatch.grad for microbatch in (forward, backward)):
        check_gradients_possible()
    # The older one comes first.
    members = {number: m for number, m in enumerate((backward, forward)) if m is not None}
    stages = list({microbatch.stage: None for microbatch in members.values()})
    if any(stage.exchange is not stages[0].exchange for stage in stages):
        raise ValueError("the microbatches are of stages with different exchanges; allowed: one exchange")
    if len({stage.number for stage in stages}) < len(stages):
        raise ValueError(f"the microbatches are of two stages of number {stages[0].number}; allowed: one number each")
    actions = [
        Action(Kind.F if microbatch is forward else Kind.B, stages.index(microbatch.stage), number)
        for number, microbatch in members.items()
    ]
    nodes = _order(actions, Chains(Placement(((0,) * len(stages),)), [stage.shape for stage in stages]), overlap)
    nodes = [node for node in nodes if not (split and node.kind is Kind.W)]
    _play(nodes, members, stages, forward.objective.loss_grad if forward else 1.0, timedelta(seconds=timeout))
    return (forward.output if forward else None), (backward.input_grad if backward else None)


def _order(actions: Sequence[Action], chains: Chains, overlap: Overlap) -> Sequence[Node]:
    overlap = parse_overlap(overlap)
    if overlap == "serial":
        return list(serial(actions, chains))
    if overlap == "pairs":
        return list(pairs([Pair(actions[1], actions[0])] if len(actions) == 2 else actions, chains))
    return ListScheduler(actions, chains, _TYPICAL, Policy(overlap), peak=2).run()


def _play(
    nodes: Sequence[Node],
    members: Mapping[int, Microbatch],
    stages: Sequence[Stage],
    aux_scale: float,
    limit: timedelta,
) -> None:
    """Play the nodes of these microbatches, given by their numbers in the nodes."""
    failures, exchange, watch = Failures(limit=limit), stages[0].exchange, watch_of(stages[0].device)
    links = Links(failures, exchange, lanes_of(exchange, failures, watch), watch=watch)
    observers = Observers(WithoutAutocast.here())

    def tagged(node: Node) -> Node:  # tags outlive this call
        return node._replace(microbatch=members[node.microbatch].index, stage=stages[node.stage].number)

    with settings_of_step(stages[0].device), ExitStack() as changed:
        for stage in stages:
            installed = Installation(stage, observers=observers)
            changed.enter_context(installed.on_modules(aux_scale))
            for microbatch in members.values():
                if microbatch.stage is stage:
                    microbatch.install(installed)
        microbatches = {(stages.index(one.stage), number): one for number, one in members.items()}
        changed.callback(observers.end, failed=False)
        turns = turns_of(nodes, tagged=tagged)
        Player(links, Times(nodes, watch), observers).play(turns, microbatches, microbatches.__getitem__)
