"""What a block's forward has left for its backward, on its way to host memory and back, segment by segment.

While the forward runs, autograd hands over each tensor that it saves. What is large enough, and held by nothing but the
graph when a segment has ended, is this segment's to leave: parameters, outputs, buffers, a batch, and tensors that are
saved elsewhere live anyway. What the forward still holds then may be a later segment's. Whole storages travel, each
once, however many tensors were saved of it.

    pack, pack, …   the forward: the graph holds a Kept for each tensor
    end             of a segment: its SegmentOffload has the storages that nothing else holds
    leave           they are copied to the host
    free            the copy has ended: their memory is freed, while tensors, views and storages stay what they are
    fetch           they have memory again, which is filled from the host
    come_back       it is, before the backward asks for it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from sys import getrefcount
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from overlap1f1b.cut.bits import storage_of
from overlap1f1b.cut.buffers import version_of
from overlap1f1b.plan import OWN_AGAIN, Node
from overlap1f1b.transport.exchange import Transfer
from overlap1f1b.transport.failures import LostRankError, headline
from overlap1f1b.transport.host import HostMemory
from overlap1f1b.transport.lanes import Flight


def _holders(tensor: Tensor) -> int:
    """Return a number that grows by one with each tensor of a storage, and with each reference to its Python object."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) + getrefcount(storage)


_ONE_TENSOR = _holders(torch.empty(0, device="cpu"))


class Kept:
    """A tensor that autograd has saved, or that a part of the forward is computed again from.

    ``away`` says whether its memory has been freed, and is not filled again yet.
    """

    __slots__ = ("__weakref__", "away", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # itself it may be an output, and the graph would keep itself alive
        self.version, self.away = version_of(self.tensor), False

    @property
    def is_changed(self) -> bool:
        """Whether it was changed in place since."""
        return version_of(self.tensor) != self.version

    def given_back(self, name: str) -> Tensor:
        """Return the tensor to the backward of a block; raise a RuntimeError if it is not what was kept."""
        if self.away or self.is_changed:
            what, allowed = ("has in host memory", "offload=False") if self.away else ("changes in place", "a copy")
            raise RuntimeError(
                f"{name} {what} a tensor of {list(self.tensor.shape)} that its backward needs; allowed: {allowed}"
            )
        return self.tensor


class BlockOffload:
    """The saved tensors of one block for one microbatch.

    Args:
        host: Where they go.
        name: Of the block, for messages.

    Attributes:
        segments: Of each segment that has ended, until its backward.
    """

    def __init__(self, host: HostMemory, name: str) -> None:
        self._host, self._name = host, name
        self._kept: list[ref[Kept]] = []
        self.segments: dict[tuple[int, int], SegmentOffload] = {}

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the block's forward, which hands over what it saves."""

        def handing_over(*args: Any) -> Any:
            with saved_tensors_hooks(self.pack, self.unpack):
                return function(*args)

        return handing_over

    def pack(self, tensor: Tensor) -> Kept | Tensor:
        """Take a tensor that autograd saves."""
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return tensor
        kept = Kept(tensor)
        here = tensor.device == self._host.device  # host memory is no better than where others are
        if here and type(tensor) is Tensor and tensor.layout is torch.strided and not tensor._is_zerotensor():
            self._kept.append(ref(kept))
        return kept

    def unpack(self, kept: Kept | Tensor) -> Tensor:
        """Give it back to a backward."""
        return kept if isinstance(kept, Tensor) else kept.given_back(self._name)

    def end(self, node: Node) -> None:
        """Note that the forward of a node's segment has ended, and which storages nothing but the graph holds now."""
        found: dict[int, list[Kept]] = {}
        for kept in (kept for one in self._kept if (kept := one()) is not None):
            found.setdefault(storage_of(kept.tensor), []).append(kept)
        self._kept, alone = [], []
        for every in found.values():
            if _holders(every[0].tensor) - _ONE_TENSOR >= len(every):
                self._kept += map(ref, every)
            elif self._host.takes(every[0].tensor) and not any(kept.is_changed for kept in every):
                alone.append(every)
        self.segments[node.segment] = SegmentOffload(self._host, self._name, alone)

    def come_back(self, node: Node) -> None:
        """Wait until what a node of the backward needs is here."""
        for place in list(self.segments) if node.op in OWN_AGAIN else [node.segment]:
            if (segment := self.segments.pop(place, None)) is not None:
                segment.come_back()


class SegmentOffload:
    """Some storages, which nothing but the graph of a segment holds until its backward.

    Args:
        alone: What is kept of each.

    Attributes:
        flight: The copy under way, or the last one.
    """

    def __init__(self, host: HostMemory, name: str, alone: Iterable[list[Kept]]) -> None:
        self._host, self._name = host, name
        self._kept = [[*map(ref, every)] for every in alone]
        self._bytes = [host.bytes_of(every[0].tensor) for every in alone]
        self._away: list[tuple[Tensor, Tensor]] = []  # bytes in host memory, and where they were
        self.flight: Flight[Any] | None = None

    def leave(self) -> Transfer[Any]:
        """Start to copy them to the host."""
        return self._host.leave(self._bytes) if self._bytes else Transfer(())

    def free(self) -> None:
        """Wait until the copy has ended, on a device what is queued from now on, and free their memory.

        What somebody has looked at since, and holds, stays.
        """
        for one, there, every in zip(self._bytes, self._await_copy(), self._kept, strict=True):
            here = [kept for reference in every if (kept := reference()) is not None]
            if _holders(one) - _ONE_TENSOR > len(here):
                continue
            self._away.append((there, one))
            one.resize_(0).untyped_storage().resize_(0)
            for kept in here:
                kept.away = True

    def fetch(self) -> Transfer[Any]:
        """Start to bring everything back."""
        for there, one in self._away:
            one.resize_(len(there))  # and the storage with it
        return self._host.fetch(*zip(*self._away, strict=True)) if self._away else Transfer(())

    def come_back(self) -> None:
        """Wait until everything is back."""
        self._await_copy()
        for kept in (kept for every in self._kept for one in every if (kept := one()) is not None):
            kept.away = False

    def _await_copy(self) -> Any:
        """Wait for the last copy; return what it brings."""
        flight, self.flight = self.flight, None
        try:
            return () if flight is None else flight.wait()
        except LostRankError as error:  # no other rank has a part in it
            assert flight is not None
            raise RuntimeError(f"{flight.node} of {self._name} failed: {headline(error.__cause__ or error)}") from error
