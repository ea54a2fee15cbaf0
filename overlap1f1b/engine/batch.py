"""A batch cut into microbatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from overlap1f1b.engine.play.player import Place, Player
from overlap1f1b.engine.result import StepResult, result_of
from overlap1f1b.engine.run.microbatch import LossFunction, Microbatch, OptionalTensors, Tensors, absent
from overlap1f1b.engine.run.stage import Stage
from overlap1f1b.plan import Node
from overlap1f1b.schedule import Placement, Program
from overlap1f1b.transport.mesh import Dimension, Mesh

Part = Tensor | tuple[Tensor | None, ...] | Mapping[str, Tensor | None]
Batch = Part | Sequence[Part]
"""A tensor or several, to be cut along the first dimension; or a list of such, one a microbatch.

Several are a tuple, or, where the model's first block names its inputs, a mapping by these names; then None stands for
one that is not given.
"""


def cut(batch: Batch | None, count: int, name: str, names: Sequence[str] = ()) -> Callable[[int], Tensors]:
    """What gives the tensors of a microbatch by its number.

    >>> part = cut(torch.arange(4), 2, "inputs")
    >>> part(0)[0].tolist(), part(1)[0].tolist()
    ([0, 1], [2, 3])

    Args:
        batch: What to cut; a list has one entry a microbatch, of any sizes.
        count: Microbatches.
        name: What it is, for messages.
        names: Of its tensors in order, where they have any.

    Raises:
        ValueError: Nothing, other names, or a batch that cannot be cut into that many equal parts.
    """
    if batch is None:
        raise ValueError(f"no {name} on a rank that needs them; allowed: this rank's batch")
    if isinstance(batch, list):
        if len(batch) != count:
            raise ValueError(f"{name}: {len(batch)} microbatches for a program of {count}; allowed: as many")
        return [_filled(_checked(part, name, names)) for part in batch].__getitem__
    whole = _checked(batch, name, names)
    if not any(tensor is not None for tensor in whole):
        raise ValueError(f"{name}: no tensor; allowed: at least one")
    sized = [(tensor, 0 if tensor is None else _size_of_part(tensor, count, name)) for tensor in whole]
    return lambda index: _filled(
        [None if tensor is None else tensor.narrow(0, index * size, size) for tensor, size in sized]
    )


def _size_of_part(tensor: Tensor, count: int, name: str) -> int:
    size = tensor.shape[0] if tensor.dim() else 0
    if size == 0 or size % count:
        raise ValueError(f"{name}: a batch of {size} cannot be cut into {count} microbatches; allowed: a multiple")
    return size // count


def _filled(given: Sequence[Tensor | None]) -> Tensors:
    """With something in the place of what is not given: what passes between blocks and stages are tensors."""
    like = next((tensor for tensor in given if tensor is not None), None)
    return tuple([absent(like) if tensor is None else tensor for tensor in given])


def _checked(value: Any, name: str, names: Sequence[str]) -> OptionalTensors:
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, Mapping) and names:
        if set(value) != set(names):
            raise ValueError(
                f"{name} named {', '.join(map(str, value)) or 'nothing'}; "
                f"allowed: exactly {', '.join(names)}, None for one that is not given"
            )
        strange = [label for label in names if not isinstance(value[label], Tensor | None)]
        if strange:
            kind = type(value[strange[0]]).__name__
            raise ValueError(f"{name}: {strange[0]} of type {kind}; allowed: a tensor, or None where it is not given")
        return tuple(value[label] for label in names)
    kinds = (Tensor, type(None)) if names else (Tensor,)
    if isinstance(value, tuple) and all(isinstance(part, kinds) for part in value):
        return value
    found = type(value).__name__
    if isinstance(value, tuple):
        found += f" of {', '.join(type(part).__name__ for part in value)}"
    if names:
        allowed = f"a tensor, a tuple or a dict of {', '.join(names)}, a list of such, None for one that is not given"
    else:
        allowed = "a tensor, a tuple of tensors, a list of either"
    raise ValueError(f"{name} of type {found}; allowed: {allowed}")


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
