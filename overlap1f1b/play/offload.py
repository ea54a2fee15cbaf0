"""What a block's forward has left for its backward, on its way to host memory and back, segment by segment.

While the forward runs, autograd hands over each tensor that it saves. What is large enough, and held by nothing but the
graph when a segment has ended, is this segment's to leave: parameters, outputs, buffers, a batch, and tensors that are
saved elsewhere live anyway. What the forward still holds then may be a later segment's. Whole storages travel, each
once, however many tensors were saved of it.

    pack, pack, …   the forward: the graph holds a Kept for each tensor
    end             of a segment: its Stay has the storages that nothing else holds
    leave           they are copied to the host
    free            the copy has ended: their memory is freed, while tensors, views and storages stay what they are
    fetch           they have memory again, which is filled from the host
    come_back       it is, before the backward asks for it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from overlap1f1b.cut.buffers import version_of
from overlap1f1b.plan import OWN_AGAIN, Node
from overlap1f1b.transport.exchange import Transfer
from overlap1f1b.transport.failures import LostRankError, headline
from overlap1f1b.transport.host import HostMemory
from overlap1f1b.transport.lanes import Flight

_holders: Callable[[int], int] = torch._C._storage_Use_Count  # of a storage: its tensors, and its object in Python


class Kept:
    """A tensor that autograd has saved, or that a part of the forward is computed again from.

    ``size`` are the bytes of its storage, if that may leave.
    """

    __slots__ = ("__weakref__", "size", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # itself it may be an output, and the graph would keep itself alive
        self.version, self.size = version_of(self.tensor), 0

    @property
    def is_changed(self) -> bool:
        """Whether it was changed in place since."""
        return version_of(self.tensor) != self.version


class Leaving:
    """The saved tensors of one block for one microbatch.

    Args:
        host: Where they go.
        name: Of the block, for messages.

    Attributes:
        stays: Of each segment that has ended, until its backward.
    """

    def __init__(self, host: HostMemory, name: str) -> None:
        self._host, self._name = host, name
        self._kept: list[ref[Kept]] = []
        self.stays: dict[tuple[int, int], Stay] = {}

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
            kept.size = kept.tensor.untyped_storage().nbytes()
            self._kept.append(ref(kept))
        return kept

    def unpack(self, kept: Kept | Tensor) -> Tensor:
        """Give it back to a backward."""
        if isinstance(kept, Tensor):
            return kept
        away = kept.size > 0 and not kept.tensor.untyped_storage().nbytes()
        if away or kept.is_changed:
            what, allowed = ("has in host memory", "offload=False") if away else ("changes in place", "a copy")
            raise RuntimeError(
                f"{self._name} {what} a tensor of {list(kept.tensor.shape)} that its backward needs; allowed: {allowed}"
            )
        return kept.tensor

    def end(self, node: Node) -> None:
        """Note that the forward of a node's segment has ended, and which storages nothing but the graph holds now."""
        found: dict[int, tuple[torch.UntypedStorage, list[Kept]]] = {}
        for kept in (kept for one in self._kept if (kept := one()) is not None):
            storage = kept.tensor.untyped_storage()
            found.setdefault(storage._cdata, (storage, []))[1].append(kept)
        self._kept, alone = [], []
        for key, (storage, every) in found.items():
            if _holders(key) > len(every) + 1:
                self._kept += map(ref, every)
            elif storage.nbytes() >= max(1, self._host.least) and storage.resizable():
                alone += [] if any(kept.is_changed for kept in every) else [storage]
        self.stays[node.segment] = Stay(self._host, self._name, alone)

    def come_back(self, node: Node) -> None:
        """Wait until what a node of the backward needs is here."""
        for segment in list(self.stays) if node.op in OWN_AGAIN else [node.segment]:
            if (stay := self.stays.pop(segment, None)) is not None:
                stay.await_copy()


class Stay:
    """Some storages, which nothing but the graph of a segment holds until its backward.

    Attributes:
        flight: The copy under way, or the last one.
    """

    def __init__(self, host: HostMemory, name: str, storages: Iterable[torch.UntypedStorage]) -> None:
        self._host, self._name = host, name
        self._bytes = [torch.empty(0, dtype=torch.uint8, device=host.device).set_(one) for one in storages]
        self._sizes = [*map(len, self._bytes)]
        self._away: Sequence[Tensor] = ()
        self.flight: Flight[Any] | None = None

    def leave(self) -> Transfer[Any]:
        """Start to copy them to the host."""
        return self._host.leave(self._bytes) if self._bytes else Transfer(())

    def free(self) -> None:
        """Wait until the copy has ended, on a device what is queued from now on, and free their memory."""
        self._away = self.await_copy()
        for one in self._bytes:
            one.resize_(0).untyped_storage().resize_(0)

    def fetch(self) -> Transfer[Any]:
        """Start to bring everything back."""
        for one, size in zip(self._bytes, self._sizes, strict=True):
            one.resize_(size)  # and the storage with it
        return self._host.fetch(self._away, self._bytes) if self._bytes else Transfer(())

    def await_copy(self) -> Any:
        """Wait for the last copy; return what it brings."""
        flight, self.flight = self.flight, None
        try:
            return () if flight is None else flight.wait()
        except LostRankError as error:  # no other rank has a part in it
            assert flight is not None
            raise RuntimeError(f"{flight.node} of {self._name} failed: {headline(error.__cause__ or error)}") from error
