"""What a rank plays in a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from overlap1f1b.engine.batch import Batch, cut
from overlap1f1b.engine.mesh import Dimension, Mesh
from overlap1f1b.engine.microbatch import LossFunction, Microbatch, Tensors
from overlap1f1b.engine.player import Place, Player
from overlap1f1b.engine.result import StepResult, result_of
from overlap1f1b.engine.stage import Stage
from overlap1f1b.plan import Node
from overlap1f1b.schedule import Placement, Program


class Microbatches(dict[Place, Microbatch]):
    """Those of a step by (stage, number), each made when its first node is played.

    Args:
        stages: Of this rank.
        placement: Of all stages.
        given: What a microbatch is made of: arguments of :meth:`Stage.microbatch` by stage and number.
        grad: Whether a backward follows.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        placement: Placement,
        given: Callable[[int, int], Mapping[str, Any]],
        *,
        grad: bool,
    ) -> None:
        self._stages, self._count, self._given, self._grad = stages, placement.stages, given, grad
        self._seed = int(torch.randint(2**62, ())) if grad else 0

    def __missing__(self, place: Place) -> Microbatch:
        number, index = place
        seed = self._seed + index * self._count + number
        given = self._given(number, index)
        made = self[place] = Microbatch(self._stages[number], index, **given, seed=seed, grad=self._grad)
        made.before, made.after = self.get((number - 1, index)), self.get((number + 1, index))
        if made.before is not None:
            made.before.after = made
        if made.after is not None:
            made.after.before = made
        return made

    def of_stage(self, number: int) -> list[Microbatch]:
        """Those of one stage that were played, in their order."""
        return [microbatch for (stage, _), microbatch in sorted(self.items()) if stage == number]


class Work(NamedTuple):
    """What a rank plays in a step.

    Args:
        microbatches: Those of each stage of the rank.
        weights: What each counts for in the mean loss, by its number.
        auxiliary: Scale of auxiliary losses; None for that of each router.
    """

    microbatches: Microbatches
    weights: dict[int, float]
    auxiliary: float | None

    def played(self, nodes: Sequence[Node], stages: Mapping[int, Stage], player: Player, *, last: int) -> StepResult:
        """Plays the nodes over the stages, of which the one numbered ``last`` ends the model."""
        with ExitStack() as installed, torch.no_grad():
            for stage in stages.values():
                installed.enter_context(stage.installed(self.auxiliary))
            player.play(nodes, self.microbatches)
        ended = self.microbatches.of_stage(last)
        return result_of(ended, [self.weights[m.index] for m in ended], player)


class Loss(NamedTuple):
    """How the loss of a step is made of its microbatches'.

    Args:
        function: ``(*outputs, *targets) → scalar`` of one microbatch.
        count_tokens: Tokens that a microbatch's target counts for; None for a mean over microbatches.
        scale: Factor of all gradients.
    """

    function: LossFunction
    count_tokens: Callable[..., int] | None
    scale: float


def work_of(
    stages: Mapping[int, Stage],
    program: Program,
    mesh: Mesh,
    loss: Loss,
    inputs: Batch | None,
    target: Batch | None,
    *,
    grad: bool,
    keep: bool,
) -> Work:
    """The microbatches of every stage of this rank, cut from a batch.

    Raises:
        ValueError: A batch that is missing or cannot be cut, or counts for no token.
    """
    placement, count = program.placement, program.microbatches
    last = placement.stages - 1
    part = cut(inputs, count, "inputs", stages[0].input_names) if 0 in stages else _none
    target_of = cut(target, count, "target") if last in stages else _none
    weights = _weights(program, mesh, loss, target_of)

    def given(number: int, index: int) -> dict[str, Any]:
        arguments: dict[str, Any] = {"inputs": part(index)} if number == 0 else {}
        if number == last:
            scale = weights[index] * loss.scale
            arguments |= {
                "target": target_of(index),
                "loss_fn": loss.function if weights[index] else _of_no_token,
                "loss_scale": scale,
                "keep_outputs": keep,
            }
        return arguments

    auxiliary = loss.scale / (count * mesh.size("dp") * mesh.size("ep"))
    return Work(Microbatches(stages, placement, given, grad=grad), weights, auxiliary)


def _none(index: int) -> Tensors:
    return ()


def _of_no_token(*given: Tensor) -> Tensor:
    """Zero, with gradients of zero: the mean over no token would be undefined, and so would its gradients."""
    zeros = [tensor.flatten()[:0].sum() for tensor in given if tensor.requires_grad]
    return sum(zeros, torch.zeros((), device=given[0].device))


def _weights(program: Program, mesh: Mesh, loss: Loss, target_of: Callable[[int], Tensors]) -> dict[int, float]:
    """Part of each microbatch in the mean loss over all ranks."""
    count, placement = program.microbatches, program.placement
    if loss.count_tokens is None:
        return dict.fromkeys(range(count), 1.0 / (count * mesh.size("dp") * mesh.size("ep")))
    pipes = [pipe for pipe, stage in placement.places(mesh.rank("pp")) if stage == placement.stages - 1]
    here = sorted({index for pipe in pipes for index in program.microbatches_of(pipe)})
    tokens = {index: int(loss.count_tokens(*target_of(index))) for index in here}

    def summed(_: Dimension, every: list[int]) -> int:
        return sum(every)

    total = mesh.combined(sum(tokens.values()), summed)
    if total <= 0:
        raise ValueError(f"count_tokens gives {total} for the whole batch; allowed: 1 or more")
    return {index: number / total for index, number in tokens.items()}
