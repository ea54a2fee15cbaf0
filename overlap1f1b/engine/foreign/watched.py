"""Calls of torch's own all-to-all inside an ``autograd.Function``, as they are watched in the first step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverloadPacket

from overlap1f1b.transport.calls import Splits, splits_of


class Watched(NamedTuple):
    """A call of ``all_to_all_single``, also the functional one, or of ``all_to_all`` with a list of tensors to fill.

    ``later`` tells whether it returns a handle to wait for, ``plain`` whether it stands outside of any Function, and
    ``version`` how often its output had been changed in place right after it.
    """

    output: Tensor | Sequence[Tensor]
    input: Tensor
    receive: Any
    send: Any
    group: dist.ProcessGroup
    later: bool = False
    plain: bool = False
    version: int = 0

    @classmethod
    def of(cls, output: Any, input: Tensor, receive: Any, send: Any, group: Any, *, later: bool = False) -> Watched:
        """Return a call that was made just now."""
        return cls(output, input, receive, send, group_named(group), later, version=version_of(output))

    @property
    def received(self) -> Tensor:
        """Received rows, after the call."""
        return self.output if isinstance(self.output, Tensor) else torch.cat(list(self.output))

    @property
    def changed(self) -> bool:
        """Whether received rows were changed in place since."""
        return self.version != version_of(self.output)

    @property
    def splits(self) -> Splits:
        """Its sizes."""
        return splits_of(len(self.input), sizes_of(self.send), sizes_of(self.receive), self.group.size())


def version_of(output: Tensor | Sequence[Tensor]) -> int:
    """Return how often tensors were changed in place."""
    return output._version if isinstance(output, Tensor) else sum(part._version for part in output)


def sizes_of(sizes: Any) -> Any:
    """Return sizes; None for equal parts, which torch is told by an empty list, too."""
    return None if sizes is None or not len(sizes) else sizes


def watched(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> Watched:
    """Return a call of ``all_to_all_single``."""
    return Watched.of(output, input, output_split_sizes, input_split_sizes, group, later=async_op)


def watched_functional(output: Tensor, input: Tensor, receive: Any, send: Any, group_name: Any) -> Watched:
    """Return a call of the functional ``all_to_all_single``, whose sizes are one list if the caller gave none."""
    receive, send = (None, None) if receive is send else (receive, send)
    return Watched.of(output, input, receive, send, group_name)


def watched_parts(output: Any, input: Any, group: Any = None, async_op: bool = False) -> Watched | None:
    """Return a call of ``all_to_all``; None if its tensors are not parts of one."""
    output, input = list(output), list(input)
    kinds = {(tensor.dtype, tensor.shape[1:]) for tensor in (*output, *input) if tensor.dim()}
    if len(kinds) != 1 or not all(tensor.dim() for tensor in (*output, *input)):
        return None
    return Watched.of(output, torch.cat(input), [len(t) for t in output], [len(t) for t in input], group)


def functional_operations() -> list[tuple[Any, OpOverloadPacket]]:
    """Return torch's functional all-to-all, each with the namespace that has it."""
    if not dist.is_available():
        return []
    namespaces = (torch.ops._c10d_functional, torch.ops._c10d_functional_autograd)
    return [(space, space.all_to_all_single) for space in namespaces if hasattr(space, "all_to_all_single")]


def group_named(group: Any) -> dist.ProcessGroup:
    """Return a process group that is given as itself, by its name, or as None for all ranks."""
    if isinstance(group, str):
        known: Any = dist.distributed_c10d
        group = known._resolve_process_group(group)
    group = dist.group.WORLD if group is None else group
    assert isinstance(group, dist.ProcessGroup)
    return group
