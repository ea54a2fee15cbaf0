"""Split a batch into microbatches, and feed the stages of a rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from overlap1f1b.cut.blocks import options_of
from overlap1f1b.cut.stage import Stage
from overlap1f1b.plan.turn import MicrobatchKey
from overlap1f1b.play.install import Installation
from overlap1f1b.play.microbatch import LossFunction, Microbatch, OptionalTensors, Tensors, absent
from overlap1f1b.schedule import Program
from overlap1f1b.schedule.values import check_kind, check_number
from overlap1f1b.transport.mesh import Mesh

MicrobatchInput = Tensor | tuple[Tensor | None, ...] | Mapping[str, Tensor | None]
Batch = MicrobatchInput | Sequence[MicrobatchInput]
"""A tensor or several, to be split along the first dimension; or a list with such an entry for each microbatch.

Several tensors are a tuple, or, if the model's first block names its inputs, a mapping by these names, in which None
stands for an input that is not given.
"""


def split_batch(batch: Batch | None, count: int, name: str, names: Sequence[str] = ()) -> Callable[[int], Tensors]:
    """Return a function that gives the tensors of a microbatch by its number.

    >>> part = split_batch(torch.arange(4), 2, "inputs")
    >>> part(0)[0].tolist(), part(1)[0].tolist()
    ([0, 1], [2, 3])

    Args:
        batch: The batch; a list has one entry a microbatch, of any sizes.
        count: Number of microbatches.
        name: Of the batch, for messages.
        names: Of its tensors in order, if the model names them.

    Raises:
        ValueError: No batch, other names, or a batch that cannot be split into that many equal parts.
    """
    if batch is None:
        none = ", or () for a loss of outputs alone" if name == "target" else ""
        raise ValueError(f"no {name} on a rank that needs them; allowed: this rank's batch{none}")
    if isinstance(batch, list):
        parts = [_filled(_checked(part, name, names)) for part in batch]
        if len(parts) != count:
            raise ValueError(f"{name}: {len(batch)} microbatches for a program of {count}; allowed: as many")
        return parts.__getitem__
    whole = _checked(batch, name, names)
    if not any(tensor is not None for tensor in whole) and (whole or name != "target"):
        raise ValueError(f"{name}: no tensor; allowed: at least one")
    sized = [(tensor, 0 if tensor is None else _size_of_part(tensor, count, name)) for tensor in whole]
    with torch.no_grad():  # an input has no history
        every = [[None] * count if tensor is None else tensor.split(size) for tensor, size in sized]
    found = list(zip(*every, strict=True)) if every else [()] * count
    return found.__getitem__ if all(size for _, size in sized) else lambda index: _filled(found[index])


def _check_rows(inputs: Batch | None, target: Batch | None) -> None:
    """Check that a target belongs to the inputs beside it: it has a row, or several, for each of theirs."""
    if isinstance(inputs, Tensor) and isinstance(target, Tensor) and inputs.dim() and target.dim():
        rows, wanted = len(target), len(inputs)
        if wanted and rows % wanted:
            raise ValueError(f"target: a batch of {rows} beside inputs of {wanted}; allowed: {wanted}, or a multiple")


def _size_of_part(tensor: Tensor, count: int, name: str) -> int:
    """Return the rows of a microbatch; ValueError where a batch does not divide."""
    if tensor.is_meta:
        raise ValueError(f"{name} on the meta device; allowed: tensors with values")
    if not tensor.dim():
        raise ValueError(f"{name}: a single number; allowed: a batch of {count} rows, or a multiple")
    size = tensor.shape[0]
    if size == 0 or size % count:
        raise ValueError(
            f"{name}: a batch of {size} cannot be split into {count} microbatches; allowed: a multiple of {count}"
            f"{'' if size else ' above 0'}"
        )
    return size // count


def _filled(values: Sequence[Tensor | None]) -> Tensors:
    """Put stand-ins where an input is not given: only tensors pass between blocks and stages."""
    like = next((tensor for tensor in values if tensor is not None), None)
    return tuple([absent(like) if tensor is None else tensor for tensor in values])


def _checked(value: Any, name: str, names: Sequence[str]) -> OptionalTensors:
    """Return a batch's tensors in their order; ValueError for other kinds or names."""
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


class Feed(NamedTuple):
    """Inputs, targets and loss of a step, for the stages of a rank.

    Args:
        arguments_of: Returns the keyword arguments of a :class:`Microbatch` (``inputs``, ``target``, ``loss_fn``,
            ``loss_grad``, ``return_outputs``) by the numbers of stage and microbatch.
        shares: Share of each microbatch in the mean loss over all ranks, by its number.
        aux_scale: Scale of auxiliary losses; None for the scale that each router has, whatever the ``loss_scale``.
        draws: Whether ``arguments_of`` may draw random numbers, as one that reads data does: they are the loop's own.
    """

    arguments_of: Callable[[int, int], Mapping[str, Any]]
    shares: Mapping[int, float]
    aux_scale: float | None
    draws: bool = True


def feed_batch(
    stages: Mapping[int, Stage],
    program: Program,
    mesh: Mesh,
    inputs: Batch | None,
    target: Batch | None,
    *,
    loss_fn: LossFunction | None,
    count_tokens: Callable[..., int | Tensor] | None = None,
    return_outputs: bool = False,
) -> Feed:
    """Return the feed of a batch. With ``count_tokens`` all ranks of the mesh must call this.

    Args:
        loss_fn: ``(*outputs, *targets) → scalar`` of one microbatch; None on ranks without the last stage.
        count_tokens: Number of tokens that a microbatch's target counts for; None for a mean over microbatches.
        return_outputs: Whether outputs are kept beside the loss.

    Raises:
        ValueError: A batch that is missing or cannot be split, or counts for no token; no ``loss_fn``.
    """
    placement, count = program.placement, program.microbatches
    last = placement.stages - 1
    names = options_of(stages[0].blocks[0]).input_names if 0 in stages else ()
    part = split_batch(inputs, count, "inputs", names) if 0 in stages else _nothing
    if last in stages and loss_fn is None:
        raise ValueError("no loss_fn on a rank with the last stage; allowed: one, or a feed that has its own")
    target_of = split_batch(target, count, "target") if last in stages else _nothing
    if last in stages:
        _check_rows(inputs, target)
    shares = _shares(program, mesh, count_tokens, target_of)

    def arguments_of(stage: int, microbatch: int) -> dict[str, Any]:
        """Return what a stage is given of a microbatch: inputs on the first, target and loss on the last."""
        arguments: dict[str, Any] = {"inputs": part(microbatch)} if stage == 0 else {}
        if stage == last:
            arguments |= {
                "target": target_of(microbatch),
                "loss_fn": loss_fn if shares[microbatch] else _of_no_token,
                "loss_grad": shares[microbatch],
                "return_outputs": return_outputs,
            }
        return arguments

    return Feed(arguments_of, shares, 1 / (count * mesh.token_ranks), draws=False)


def _nothing(index: int) -> Tensors:
    return ()


def _of_no_token(*tensors: Tensor) -> Tensor:
    """Return zero, with gradients of zero: the mean over no token would be undefined, and so would its gradients."""
    zeros = [tensor.flatten()[:0].sum() for tensor in tensors if tensor.requires_grad]
    return sum(zeros, torch.zeros((), device=tensors[0].device))


def _shares(
    program: Program, mesh: Mesh, count_tokens: Callable[..., int | Tensor] | None, target_of: Callable[[int], Tensors]
) -> dict[int, float]:
    """Return the share of each microbatch that ends here in the mean loss over all ranks."""
    count, placement = program.microbatches, program.placement
    if count_tokens is None:
        return dict.fromkeys(range(count), 1.0 / (count * mesh.data_ranks))
    pipes = [pipe for pipe, stage in placement.places(mesh.rank("pp")) if stage == placement.stages - 1]
    here = sorted({index for pipe in pipes for index in program.microbatches_of(pipe)})
    counted = [count_tokens(*target_of(index)) for index in here]
    # Tensors are read together: each read may wait for a device.
    unread = [count for count in counted if isinstance(count, Tensor)]
    if strange := [count for count in unread if count.numel() != 1]:
        raise ValueError(f"count_tokens returns a tensor {[*strange[0].shape]}; allowed: one number")
    read = iter(torch.stack([count.reshape(()) for count in unread]).tolist() if unread else ())
    tokens = [next(read) if isinstance(count, Tensor) else count for count in counted]
    for number in tokens:
        check_number("a result of count_tokens", number)
        if number != int(number):
            raise ValueError(f"a result of count_tokens={number}; allowed: a whole number")
    tokens = list(map(int, tokens))
    (total,) = mesh.sums(sum(tokens) / mesh.size("tp"))
    if total <= 0:
        raise ValueError(f"count_tokens gives {total:g} for the whole batch; allowed: 1 or more")
    return {index: number / total for index, number in zip(here, tokens, strict=True)}


_ARGUMENTS = frozenset(("inputs", "target", "loss_fn", "loss_grad", "return_outputs"))


class Microbatches(dict[MicrobatchKey, Microbatch]):
    """Microbatches of a step by the numbers of stage and microbatch; the player begins each at its first node.

    Raises:
        ValueError: The feed lacks the share of a microbatch that ends on this rank.
    """

    def __init__(
        self,
        installations: Mapping[int, Installation],
        program: Program,
        rank: int,
        feed: Feed,
        *,
        seed: int,
        grad: bool,
        loss_scale: float,
    ) -> None:
        self._installations, self._count, self._feed, self._grad = installations, program.placement.stages, feed, grad
        check_kind("shares of a feed", feed.shares, Mapping)
        for pipe, stage in program.placement.places(rank):
            missing = [index for index in program.microbatches_of(pipe) if index not in feed.shares]
            if stage == self._count - 1 and missing:
                raise ValueError(
                    f"a feed without shares of microbatches {missing}; allowed: a share of each that ends here"
                )
        self._seed = seed  # of the random numbers of all microbatches
        self._loss_scale = loss_scale

    def begin(self, key: MicrobatchKey) -> Microbatch:
        """Add a microbatch with its part of the batch; ValueError if the feed gives it none, or other things."""
        number, index = key
        seed = self._seed + index * self._count + number
        arguments = self._feed.arguments_of(number, index)
        if not arguments.keys() <= _ARGUMENTS:
            unknown = ", ".join(sorted(arguments.keys() - _ARGUMENTS))
            raise ValueError(f"a feed gives {unknown}; allowed: {', '.join(sorted(_ARGUMENTS))}")
        if number == 0 and arguments.get("inputs") is None:
            raise ValueError(f"a feed gives microbatch {index} no inputs; allowed: at least () for the first stage")
        if number == self._count - 1 and self._grad and arguments.get("loss_fn") is None:
            raise ValueError(f"a feed gives microbatch {index} no loss_fn; allowed: one for the last stage")
        loss_grad = self._loss_scale * arguments.get("loss_grad", 1.0)
        own = {"index": index, "loss_grad": loss_grad, "seed": seed, "grad": self._grad}
        installed = self._installations[number]
        made = self[key] = Microbatch(installed.stage, **{**arguments, **own}, installed=installed)
        before, after = self.get((number - 1, index)), self.get((number + 1, index))
        if before is not None:
            made.follow(before)
        if after is not None:
            after.follow(made)
        return made

    def of_stage(self, number: int) -> list[Microbatch]:
        """Return the microbatches of one stage that were played, in their order."""
        return [microbatch for (stage, _), microbatch in sorted(self.items()) if stage == number]
