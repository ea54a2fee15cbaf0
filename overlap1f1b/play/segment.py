"""Segments of a block's forward, and the tensors that enter them.

A *segment* runs from one exchange to the next. No two segments share a graph, so a plain backward walks each of them
once. What a segment uses and did not make itself enters it as a new tensor without a history: the block's inputs, the
rows that an exchange brought, tensors that an earlier segment made (a residual, a shared expert's output, routing
weights), and parameters that are used in other places, too. An :class:`Entry` catches the gradient of such a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.graph import GradientEdge
from torch.nn import Parameter

from overlap1f1b.cut.edges import as_dtype, edge_of, next_sequence_number
from overlap1f1b.cut.edges import backward as walk_back
from overlap1f1b.plan import Place
from overlap1f1b.play.gradients import Root, WeightQueue
from overlap1f1b.transport import devices
from overlap1f1b.transport.calls import ExchangeCall, LibraryFunction
from overlap1f1b.transport.exchange import Transfer
from overlap1f1b.transport.functions import direct, plain_apply
from overlap1f1b.transport.lanes import Flight
from overlap1f1b.transport.streams import SideStream

_grad_enabled, _set_grad_enabled = torch.is_grad_enabled, torch._C._set_grad_enabled
NOTHING_ENTERED: Any = MappingProxyType({})  # what most segments have of what enters beside rows and inputs


class Entry:
    """A place where a tensor enters a segment: it catches the gradient, and holds neither values nor graph."""

    __slots__ = ("device", "dtype", "grad", "shape")

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.grad: Tensor | None = None  # before a backward has reached it

    def dense(self) -> Tensor:
        """Return the gradient, or zeros if none has come."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device) if self.grad is None else self.grad

    def enter(self, tensor: Tensor, anchor: Tensor) -> Tensor:
        """Return the tensor without its history; it requires a gradient, which this entry will catch.

        ``anchor`` is any leaf that requires a gradient; it gets none.
        """
        before = _grad_enabled()
        _set_grad_enabled(True)
        try:
            entered: Tensor = _enter(anchor, (tensor,), self)
        finally:
            _set_grad_enabled(before)
        return entered


@direct
class Enter(torch.autograd.Function):
    """The tensor as it is, in a graph of its own."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: tuple[Tensor], entry: Entry) -> Tensor:
        ctx.entry = entry
        ctx.materialize_grads = False
        return tensor[0].detach()  # no view: it may be changed in place, and shares its version with the tensor

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None, None]:
        entry = ctx.entry
        if grad is not None:
            entry.grad = grad if entry.grad is None else entry.grad + grad
        return None, None, None


_enter = plain_apply(Enter)


class RowKind(NamedTuple):
    """Shape of one row of a tensor, its dtype and device."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes(self) -> int:
        """Size of a row."""
        return self.dtype.itemsize * self.shape.numel()

    def zeros(self, count: int) -> Tensor:
        """Return rows of zeros ``[count, …]``."""
        return torch.zeros(count, *self.shape, dtype=self.dtype, device=self.device)


class Layout(NamedTuple):
    """The rows of each tensor of one exchange; several tensors travel as one, a row's bytes side by side."""

    rows: tuple[RowKind, ...]

    @classmethod
    def of_tensors(cls, tensors: Sequence[Tensor]) -> Layout:
        """Return the layout of some tensors."""
        return cls(tuple([RowKind(tensor.shape[1:], tensor.dtype, tensor.device) for tensor in tensors]))

    @property
    def like(self) -> Tensor:
        """Packed rows ``[0, …]``."""
        return self.pack([kind.zeros(0) for kind in self.rows])

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the tensors as one; of bytes ``[R, W]`` if there are several."""
        if len(tensors) == 1:
            return as_dtype(tensors[0], self.rows[0].dtype)
        count, parts = len(tensors[0]), []
        for kind, tensor in zip(self.rows, tensors, strict=True):
            packed = tensor.new_zeros(count, _padded(kind.bytes), dtype=torch.uint8)
            width = kind.shape.numel()
            packed.view(kind.dtype)[:, :width] = tensor.reshape(count, width)  # of any strides, as an expanded gradient
            parts.append(packed)
        return torch.cat(parts, 1)

    def unpack(self, rows: Tensor) -> list[Tensor]:
        """Return the tensors of packed rows."""
        if len(self.rows) == 1:
            return [rows]
        widths = [_padded(kind.bytes) for kind in self.rows]
        return [
            part[:, : kind.bytes].contiguous().view(-1).view(kind.dtype).view(len(rows), *kind.shape)
            for kind, part in zip(self.rows, rows.split(widths, 1), strict=True)
        ]


def _padded(size: int) -> int:
    """Round up to 16 bytes, so that every part is aligned for its dtype and for a GPU's products; never to 0."""
    return max(-(-size // 16), 1) * 16


class Crossing(NamedTuple):
    """A tensor of an earlier segment, or a parameter, in a segment that uses it.

    Gradients of later uses begin at its node in this segment's graph, so that all uses are summed in the order of one
    backward of everything.
    """

    made: GradientEdge  # its place in the graph that made it
    node: ReferenceType[Any]  # in this segment's graph, which alone keeps it
    entry: Entry

    @classmethod
    def into_segment(cls, tensor: Tensor, anchor: Tensor) -> tuple[Crossing, Tensor]:
        """Return the crossing of a tensor, and what enters."""
        if torch._C._are_functorch_transforms_active():  # a transform of torch.func uses it from around itself
            with temporarily_clear_interpreter_stack():
                return cls.into_segment(tensor, anchor)
        entry = Entry(tensor)
        entered = entry.enter(tensor, anchor)
        return cls(edge_of(tensor), ref(entered.grad_fn), entry), entered

    @property
    def entered(self) -> GradientEdge | None:
        """Its place in this segment's graph, where gradients of later uses begin; None if the graph lacks it."""
        node = self.node()
        return None if node is None else GradientEdge(node, 0)


class Use(NamedTuple):
    """A use of a tensor that entered a segment."""

    storage: int  # see :func:`storage_of`
    version: int  # how often its memory had been changed in place
    graph: Any  # node of what entered
    first: Any  # the same, when it entered


class LibraryExchange:
    """One exchange for one microbatch that a library carries out by a function of its own, such as DeepEP's dispatch.

    It has a graph of its own. Both methods run where lanes start their transfers: on a CPU in the lane's thread, which
    they occupy until the exchange has ended; on a GPU the thread of the engine queues them on ``stream``.
    """

    def __init__(self, function: LibraryFunction, stream: SideStream, anchor: Tensor) -> None:
        self.function, self.stream, self.anchor = function, stream, anchor
        self.requires_grad: list[bool] = []
        """Whether each result requires a gradient; empty before the forward."""
        self._entries: list[Entry] = []
        self._results: list[GradientEdge] = []

    def forward(self, tensors: Sequence[Tensor]) -> Transfer[Any]:
        """Start the exchange of some tensors without a history; its result is a list of what the library returns."""
        results: list[Any] = []

        def run(*sent: Tensor) -> None:
            """Call the library's function on this stream, in a graph of its own."""
            self._entries = [Entry(tensor) for tensor in sent]
            for tensor in sent:  # a function may keep them for its backward, which frees them on this stream
                if (gpu := devices.gpu_of(tensor.device)) is not None:
                    tensor.record_stream(gpu.current_stream(tensor.device))
            with torch.enable_grad():
                entering = zip(sent, self._entries, strict=True)
                returned = self.function(*[entry.enter(tensor, self.anchor) for tensor, entry in entering])
            self.requires_grad = [isinstance(result, Tensor) and result.requires_grad for result in returned]
            pairs = list(zip(returned, self.requires_grad, strict=True))
            self._results = [edge_of(result) for result, required in pairs if required]
            results.extend(result.detach() if required else result for result, required in pairs)

        mark = self.stream.run(run, *tensors)
        return Transfer(results, source=tensors, mark=mark)

    def backward(self, grads: Sequence[Tensor]) -> Transfer[Any]:
        """Start the exchange back of the gradients of all differentiable results.

        Its result is a list of the gradients of the tensors that the forward sent. It is filled on the stream, before
        the mark. The library's graph is released.
        """
        edges, entries, self._results, self._entries = self._results, self._entries, [], []
        found: list[Tensor] = []

        def run(*arrived: Tensor) -> None:
            walk_back(edges, arrived)
            found.extend(entry.dense() for entry in entries)

        mark = self.stream.run(run, *grads)
        return Transfer(found, source=grads, mark=mark)


@dataclass(slots=True, eq=False)
class Sent:
    """An exchange behind a segment."""

    place: Place
    call: ExchangeCall  # what the forward handed out
    layout: Layout  # of the tensors that it sends
    requires_grad: Sequence[bool]  # whether each of them does
    edges: Sequence[GradientEdge | None]  # the graph of each of them that does
    library: LibraryExchange | None  # carries it out, if a library does
    rows: Any  # ``[R, …]`` to send next, or their gradients to send back; for a library the tensors
    uncut_rows: int | None = None  # number of rows before those that are not sent were cut off; None for a library
    counts: Flight[Tensor] | None = None  # on their way to the experts, beside the rows of a dispatch

    @property
    def results_require_grad(self) -> Sequence[bool]:
        """Whether each tensor that it brings requires a gradient."""
        return self.requires_grad if self.library is None else self.library.requires_grad

    def results(self, received: Any) -> list[Any]:
        """Return the tensors, or gradients, that it has brought."""
        if self.library is not None:
            return received
        return [received] if len(self.layout.rows) == 1 else self.layout.unpack(received)

    def grads_back(self, entries: Sequence[Entry | None]) -> Any:
        """Return what it takes back: gradients of what it brought, which is zero at None."""
        if self.library is not None:
            return [entry.dense() for entry in entries if entry is not None]
        return self.layout.pack(
            [
                kind.zeros(self.count) if entry is None else entry.dense()
                for kind, entry in zip(self.layout.rows, entries, strict=True)
            ]
        )

    @property
    def count(self) -> int:
        """Number of rows that it brings."""
        return sum(self.call.splits.sizes(back=self.call.back)[1])


class Segment:
    """One segment of a block's forward for one microbatch, at a place in the block."""

    start = end = -1  # sequence numbers: its autograd nodes have numbers from ``start`` on, below ``end``
    crossed: dict[tuple[int, int], Crossing] = NOTHING_ENTERED  # of earlier segments, by their places in the graph
    parameters: dict[Parameter, Crossing] = NOTHING_ENTERED  # that are used in other places, too
    # While it runs and no longer: leaves that entered; the last use of each; and of each of their storages one tensor,
    # and its version when it entered.
    here: dict[object, Tensor] = NOTHING_ENTERED
    uses: dict[tuple[int, int], Use] = NOTHING_ENTERED
    versions: dict[int, tuple[Tensor, int]] = NOTHING_ENTERED
    changed: Sequence[int] = ()  # storages that it has changed in place
    outs: Sequence[Root | None] = ()  # outputs, of a block's last segment: only their graph is held

    def __init__(self, place: Place, queue: WeightQueue) -> None:
        self.op, self.call, self.part = place
        self.queue = queue  # where its weight gradients wait
        self.taken: list[tuple[Sent, int]] = []
        """The exchanges before it, with the number of tensors that each brought."""
        self.received: list[Entry | None] = []
        """Entries of these tensors, or of the block's inputs; None for one that requires no gradient."""
        self.roots: list[GradientEdge] = []
        """Where gradients enter its graph."""
        self.grads: list[Tensor] = []
        """These gradients."""
        self.sent: list[Sent] = []
        """The exchanges behind it."""

    def cross(self) -> None:
        """Prepare for what enters beside rows and inputs, as few segments must."""
        if self.crossed is NOTHING_ENTERED:
            self.crossed, self.parameters, self.here, self.uses, self.versions = {}, {}, {}, {}, {}

    def enter(self, values: Sequence[Any], requires_grad: Sequence[bool], anchor: Tensor) -> list[Any]:
        """Return what the segment begins with: values as new tensors, where they require a gradient."""
        entered: list[Any] = []
        self.start = next_sequence_number()
        for value, required in zip(values, requires_grad, strict=True):
            entry = Entry(value) if required else None
            self.received.append(entry)
            entered.append(value if entry is None else entry.enter(value, anchor))
        return entered

    def close(self) -> None:
        """Release what entered, at the segment's end."""
        self.end = next_sequence_number()
        if self.here:
            self.changed = [storage for storage, (one, before) in self.versions.items() if one._version != before]
            self.here, self.uses, self.versions = {}, {}, {}

    def changed_through_another(self, key: tuple[int, int]) -> bool:
        """Return whether another tensor that entered has the same memory, and was changed in place with a graph."""
        return any(
            use.storage == self.uses[key].storage and self.here[other].grad_fn is not use.first
            for other, use in self.uses.items()
            if other != key
        )

    def add_root(self, edge: GradientEdge, grad: Tensor) -> None:
        """Note a gradient with which the walk of this segment begins."""
        self.roots.append(edge)
        self.grads.append(grad)

    def walk(self) -> None:
        """Run the segment's backward, and release its graph."""
        roots, grads = self.roots, self.grads
        self.roots, self.grads = [], []
        if roots:
            walk_back(roots, grads)
