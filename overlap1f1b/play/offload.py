"""What a block's forward has left for its backward, on its way to host memory and back.

While the forward runs, autograd hands over each tensor that it saves. What is large enough, and held by nothing but the
graph when the forward has ended, can leave: parameters, outputs, buffers, a batch, and tensors that are saved elsewhere
live anyway. Whole storages travel, each once, however many tensors were saved of it.

    pack, pack, …   the forward: the graph holds a Kept for each tensor
    leave           storages that nothing else holds are copied to the host
    free            the copy has ended: they are dropped
    fetch           new ones are filled from the host
    come_back       each Kept has its tensor again, before the backward asks for it
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from overlap1f1b.transport.exchange import Transfer
from overlap1f1b.transport.failures import LostRankError, headline
from overlap1f1b.transport.host import HostMemory, Parcel, bytes_of
from overlap1f1b.transport.lanes import Flight

_holders: Callable[[int], int] = torch._C._storage_Use_Count  # of a storage: its tensors, and its object in Python


class Kept:
    """A tensor that autograd has saved."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        # None while it is away. Not the tensor itself: it may be an output, and the graph would keep itself alive.
        self.tensor: Any = tensor.detach()
        self.version = self.tensor._version

    @property
    def is_changed(self) -> bool:
        """Whether it was changed in place since."""
        return bool(self.tensor._version != self.version)


_View = tuple[torch.dtype, int, torch.Size, tuple[int, ...]]
"""A tensor on a storage: dtype, offset, shape and strides."""


class Leaving:
    """The saved tensors of one block for one microbatch.

    Args:
        host: Where they go.
        name: Of the block, for messages.

    Attributes:
        flight: The copy under way, or the last one.
    """

    def __init__(self, host: HostMemory, name: str) -> None:
        self._host, self._name = host, name
        self._kept: list[ref[Kept]] = []
        self._away: list[tuple[int, list[tuple[ref[Kept], _View]]]] = []  # size of each storage, and its tensors
        self._sources: list[Tensor] = []
        self._targets: list[Tensor] = []
        self._parcel: Parcel | None = None
        self.flight: Flight[Any] | None = None

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
        lazy = tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor()
        if type(tensor) is Tensor and tensor.layout is torch.strided and not lazy:
            self._kept.append(ref(kept))
        return kept

    def unpack(self, kept: Kept | Tensor) -> Tensor:
        """Give it back to a backward."""
        if isinstance(kept, Tensor):
            return kept
        if kept.is_changed:
            raise RuntimeError(
                f"{self._name} changes in place a tensor of {list(kept.tensor.shape)} that its backward needs; "
                "allowed: a copy"
            )
        tensor: Tensor = kept.tensor
        return tensor

    def leave(self) -> Transfer[Any]:
        """Start to copy what nothing else holds to the host."""
        found: dict[int, tuple[torch.UntypedStorage, list[Kept]]] = {}
        for kept in (kept for one in self._kept if (kept := one()) is not None):
            storage = kept.tensor.untyped_storage()
            found.setdefault(storage._cdata, (storage, []))[1].append(kept)
        self._kept = []
        for key, (storage, every) in found.items():
            large, alone = storage.nbytes() >= max(1, self._host.least), _holders(key) == len(every) + 1
            if not (large and alone) or any(kept.is_changed for kept in every):
                continue
            views = [(ref(kept), _view_of(kept.tensor)) for kept in every]
            for kept in every:
                kept.tensor = None
            self._sources.append(bytes_of(storage))
            self._away.append((storage.nbytes(), views))
        return self._host.leave(self._sources) if self._sources else Transfer(None)

    def free(self) -> None:
        """Wait until the copy has ended, on a device what is queued from now on, and drop what has left."""
        self._parcel, self._sources = self._arrived(), []

    def fetch(self) -> Transfer[Any]:
        """Start to bring everything back."""
        if self._parcel is None:
            return Transfer(None)
        like = self._host.device
        self._targets = [torch.empty(size, dtype=torch.uint8, device=like) for size, _ in self._away]
        return self._host.fetch(self._parcel, self._targets)

    def come_back(self) -> None:
        """Wait until everything is back, and give it to the graph."""
        self._arrived()
        targets, away, parcel = self._targets, self._away, self._parcel
        self._targets, self._away, self._parcel = [], [], None
        for target, (_, views) in zip(targets, away, strict=True):
            for one, (dtype, offset, shape, strides) in views:
                if (kept := one()) is not None:  # views of one tensor: a change in place shows in all of them
                    whole = target[: len(target) // dtype.itemsize * dtype.itemsize].view(dtype)
                    kept.tensor = whole.as_strided(shape, strides, offset)
                    kept.version = kept.tensor._version
        if parcel is not None:
            self._host.keep(parcel)

    def _arrived(self) -> Any:
        flight, self.flight = self.flight, None
        try:
            return None if flight is None else flight.wait()
        except LostRankError as error:  # no other rank has a part in it
            assert flight is not None
            raise RuntimeError(f"{flight.node} of {self._name} failed: {headline(error.__cause__ or error)}") from error


def _view_of(tensor: Tensor) -> _View:
    return tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride()
