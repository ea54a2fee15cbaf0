"""A user's own all-to-all, and ``dist.all_to_all`` with parts of any sizes on gloo, which sends equal parts alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from overlap1f1b.engine import declare


class Own(torch.autograd.Function):
    """A user's own all-to-all; without sizes of equal parts."""

    @staticmethod
    def forward(ctx: Any, group: Any, rows: Tensor, receive: Any, send: Any) -> Tensor:
        ctx.group, ctx.receive, ctx.send = group, receive, send
        output = rows.new_empty((len(rows) if receive is None else sum(receive), *rows.shape[1:]))
        dist.all_to_all_single(output, rows.contiguous(), receive, send, group=group)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, Own.apply(ctx.group, grads[0], ctx.send, ctx.receive), None, None


declare(Own, tensor=1, send=3, receive=2, group=0)


@contextmanager
def any_sizes() -> Iterator[None]:
    """Let ``dist.all_to_all`` take parts of any sizes inside the context; function modes see it as torch's own."""
    before = dist.all_to_all

    def all_to_all(output: list[Tensor], input: list[Tensor], group: Any = None, async_op: bool = False) -> None:
        if has_torch_function(tuple(input)):
            handle_torch_function(all_to_all, tuple(input), output, input, group=group, async_op=async_op)
            return
        sizes = [len(part) for part in output], [len(part) for part in input]
        brought = input[0].new_empty((sum(sizes[0]), *input[0].shape[1:]))
        dist.all_to_all_single(brought, torch.cat(list(input)), *sizes, group=group)
        for part, came in zip(output, brought.split(sizes[0]), strict=True):
            part.copy_(came)

    dist.all_to_all = all_to_all
    try:
        yield
    finally:
        dist.all_to_all = before
