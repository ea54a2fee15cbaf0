"""Exchanges that blocks make by themselves, without our Experts: the first step shows them, later steps hide them.

Three kinds are found: calls of the public ``exchange``; torch's functional ``all_to_all_single``, by whatever name it
is called; and an ``autograd.Function`` that is declared to be an all-to-all and no more
(:mod:`overlap1f1b.cut.declaration`).
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from overlap1f1b.plan import Op
from overlap1f1b.transport.calls import ExchangeCall, LibrarySplits, Splits

Forms = tuple[tuple[torch.dtype, int], ...]
"""Dtype and number of dimensions of each tensor of an exchange."""


def forms_of(tensors: Sequence[Tensor]) -> Forms:
    return tuple([(tensor.dtype, tensor.ndim) for tensor in tensors])


def is_over(group: dist.ProcessGroup, ranks: Sequence[int], splits: Splits) -> bool:
    """Return whether an exchange is over the ranks that share the experts; a library's may be over more."""
    every = dist.get_process_group_ranks(group)
    return set(ranks) <= set(every) if isinstance(splits, LibrarySplits) else list(ranks) == every


def takes_gradient(tensors: Sequence[Tensor]) -> bool:
    """Return whether a gradient will come back for any of the tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def holds_rows(tensors: Iterable[Tensor]) -> bool:
    """Return whether a collective of these tensors moves rows ``[R, …]``: not sizes, statistics or flat buckets."""
    return any(
        t.ndim > 1 and (t.requires_grad or t.is_floating_point() or t.dtype in (torch.uint8, torch.int8))
        for t in tensors
    )


class OwnExchange(NamedTuple):
    """An exchange of a block, the same for all microbatches."""

    op: Op  # ``COMBINE`` if its sizes are the swapped sizes of an earlier exchange; else ``DISPATCH``
    back_of: int  # position of that exchange; -1 for a dispatch
    forms: Forms  # of its tensors


class OwnExchanges(NamedTuple):
    """The exchanges at which a block is cut, in their order."""

    where: str = ""  # name of the block
    ranks: tuple[int, ...] = ()  # global numbers of the ranks that share the experts
    every: tuple[OwnExchange, ...] = ()  # none if the block is not cut
    # Whether all exchanges by a library run where they stand, since one has no gradient: all are hidden or none, as
    # their order must be the same on all ranks.
    library_stands: bool = False

    def hides(self, tensors: Sequence[Tensor], splits: Splits, group: dist.ProcessGroup) -> bool:
        """Return whether an exchange suspends the forward: not without a gradient, nor over other ranks.

        ValueError if a library's exchange has no gradient, and those of the first step had one.
        """
        library = isinstance(splits, LibrarySplits)
        if not self.every or not is_over(group, self.ranks, splits) or (library and self.library_stands):
            return False
        if takes_gradient(tensors):
            return True
        if library:
            raise ValueError(
                f"{self.where} exchanges rows by a library without a gradient, and with one in the first step; "
                "allowed: the same in every step"
            )
        return False

    def check(self, number: int, call: ExchangeCall, sizes: Sequence[Splits]) -> None:
        """Check that an exchange is as in the first step; ``sizes`` are those of the exchanges before it."""
        wanted, found = self.every[number], forms_of(call.tensors)
        where = f"exchange {number} of {self.where}"
        if found != wanted.forms:
            raise ValueError(
                f"{where} has tensors of dtypes and dimensions {list(found)}; "
                f"allowed: {list(wanted.forms)}, as in the first step"
            )
        if wanted.back_of < 0:
            return
        splits, earlier = call.splits, sizes[wanted.back_of]
        if (splits.send, splits.receive) != (earlier.receive, earlier.send):
            raise ValueError(
                f"{where} sends {splits.send} and receives {splits.receive}; allowed: {earlier.receive} and "
                f"{earlier.send}, the sizes of the exchange whose rows it took back in the first step, swapped"
            )
