"""The bytes of tensors: the most at once in a step, and what each node holds."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from overlap1f1b.learn.peers import Peers
from overlap1f1b.plan import CostKey, Held, Node, Place, balanced, cost_key
from overlap1f1b.play.observers import Observer
from overlap1f1b.play.times import Times
from overlap1f1b.schedule import Kind
from overlap1f1b.transport import devices
from overlap1f1b.transport.mesh import DIMENSIONS


def peak_bytes(device: torch.device, step: Callable[[], object]) -> int:
    """Return the most bytes of tensors at once during ``step``, beyond the bytes at its start."""
    with ByteCount(device) as count:
        step()
    return count.peak


class ByteCount(TorchDispatchMode):
    """Counts bytes of tensors while it is entered, beyond those at its start; ``peak`` is the most at once so far.

    On a GPU the allocator counts, when this thread launches. Elsewhere the arguments and results of this thread's
    operators are counted at the end of each: it does not matter which thread frees a tensor, or has received it.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device, self._gpu = device, devices.gpu_of(device)
        self.before = self.peak = 0
        self._bytes = self._most = 0
        self._here: dict[int, tuple[StorageWeakRef, int, int]] = {}  # with the bytes at the start, and those since
        self._level = 0  # when the last node had ended
        self._noted: dict[Node, Held] = {}

    @property
    def sees_operators(self) -> bool:
        """Whether it counts the arguments and results of operators, not an allocator."""
        return self._gpu is None

    def __enter__(self) -> ByteCount:
        if self._gpu is not None:  # its allocator counts: the mode is not entered
            self._gpu.reset_peak_memory_stats(self._device)
            self.before = self._gpu.memory_allocated(self._device)
            return self
        gc.collect()
        self.meet(thing for thing in gc.get_objects() if issubclass(type(thing), Tensor))
        # All that is there was held before the start, and counts as nothing since.
        self.before = self._bytes
        self._here = {key: (storage, of, 0) for key, (storage, _, of) in self._here.items()}
        self._bytes = self._most = 0
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._gpu is None:
            super().__exit__(*(error or (None, None, None)))
        else:
            devices.settle(self._device)
            self.read()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.meet(leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor))
        if self._bytes > self._most:  # perhaps a new peak: freed storages are not subtracted yet
            self._forget()
            self._most = max(self._most, self._bytes)
            self.peak = max(self.peak, self._most)
        return result

    def meet(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of tensors that are not known yet, or have another size now."""
        for tensor in list(tensors):
            if tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)  # while it is held, no other storage gets its address
                held, before, since = self._here.get(reference.cdata, (reference, 0, 0))
                if (now := storage.nbytes() - before) != since or held is reference:
                    self._here[reference.cdata] = held, before, now
                    self._bytes += now - since

    def _forget(self) -> None:
        for key, (reference, before, since) in list(self._here.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(key)
            if storage is None:
                self._bytes -= self._here.pop(key)[2]
            elif (now := storage.nbytes() - before) != since:  # as FSDP2 has released it
                self._here[key], self._bytes = (reference, before, now), self._bytes + now - since

    def read(self) -> tuple[int, int]:
        """Return the bytes now, and the most since this was called before."""
        if self._gpu is None:
            self._forget()
            now, most = self._bytes, max(self._most, self._bytes)
            self._most = now
        else:
            now = self._gpu.memory_allocated(self._device) - self.before
            most = self._gpu.max_memory_allocated(self._device) - self.before
            self._gpu.reset_peak_memory_stats(self._device)
        self.peak = max(self.peak, most)
        return now, most

    def note(self, node: Node) -> None:
        """Note what a node has changed since the last one: it has ended, or its transfer has started."""
        self._level = self._add(node, self._level)

    def _add(self, node: Node, since: int) -> int:
        now, most = self.read()
        kept, top, _ = self._noted.get(node, Held())
        self._noted[node] = Held(kept + now - since, max(top, kept + most - since))
        return now

    def came(self, node: Node, tensors: Iterable[Tensor]) -> None:
        """Note what an exchange has brought, which another thread has allocated, as held by it."""
        before, _ = self.read()
        self.meet(tensors)
        self._level += self._add(node, before) - before

    def by_node(self) -> dict[CostKey, Held]:
        """Return what nodes hold: of each the median over microbatches; what the first holds more is counted apart."""
        every: dict[CostKey, list[Held]] = {}
        for node, held in self._noted.items():
            every.setdefault(cost_key(node), []).append(held)
        found = {}
        for key, (first, *others) in every.items():
            kept, most = median(held.kept for held in others or [first]), max(held.most for held in others or [first])
            found[key] = Held(kept, most, first.kept - kept)
        return balanced(found)


class NodeBytes(Observer):
    """Counts the bytes of a step, and what each node holds."""

    keeps_order = True

    def __init__(self, device: torch.device) -> None:
        self.count = ByteCount(device)

    def begin(self, times: Times) -> None:
        self.count.__enter__()

    def ready(self, node: Node, received: Mapping[Place, Any]) -> None:
        if self.count.sees_operators:
            for (op, call, part), brought in received.items():
                leaves = (leaf for leaf in tree_leaves(brought) if isinstance(leaf, Tensor))
                self.count.came(node._replace(op=op, call=call, part=part), leaves)

    def after(self, node: Node) -> None:
        self.count.note(node)

    def end(self, *, failed: bool) -> None:
        self.count.__exit__()


class Counted(NamedTuple):
    """What a step that counted bytes has shown."""

    held: Mapping[CostKey, Held] = {}
    """What nodes hold, on the ranks with the least room for a microbatch: all plans are made for these."""
    rooms: tuple[float, ...] = ()
    """Bytes that each pipeline rank may hold beyond those before a step; none where nothing limits them."""
    before: int = 0
    """Bytes on this rank before the step."""
    fits: float = 0.0
    """Bytes on this rank in the last step that ended, as far as they are known."""


def counted(count: ByteCount, limit: float, peers: Peers) -> Counted:
    """Return what a count has shown, the same on all ranks beside ``before`` and ``fits``; all must call this.

    ``limit`` are the bytes that this rank may hold in all, ``math.inf`` for any number.
    """
    held, room, mesh = count.by_node(), limit - count.before, peers.mesh
    whole = sum(one.kept for (_, kind, *_), one in held.items() if kind is Kind.F)
    fit = (room - sum(one.first for one in held.values())) / (whole or 1.0)
    every, mine = mesh.every((fit, -whole, room, held)), list[tuple[float, Mapping[CostKey, Held]]]()
    for at in range(mesh.size("pp")):
        ranks = mesh.ranks(pp=[at], over=DIMENSIONS)
        mine.append(min((every[rank] for rank in ranks), key=itemgetter(0, 1))[2:])
    tightest = peers.agreed(mine)
    rooms = tuple(room for room, _ in tightest) if limit < math.inf else ()
    nodes = {key: of for _, held in tightest for key, of in held.items()}
    return Counted(nodes, rooms, count.before, count.before + count.peak)
