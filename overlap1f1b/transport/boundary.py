"""Transfers between stages on different pipeline ranks: activations one way, their gradients the other.

In the first step a header precedes each payload and gives dtype and shape of its tensors. Later steps know both.

On gloo each receive is posted one ahead, before the peer sends. On a device a receive is a kernel that waits there for
its peer. So it starts at its own node, which stands where the peer sends, see :mod:`overlap1f1b.plan.rendezvous`.
Each direction between two ranks has a communicator and so a stream of its own, on which one rank only sends and the
other only receives. Headers travel between the hosts.
"""

import pickle
import time
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise, starmap
from operator import itemgetter
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from overlap1f1b.plan import CostKey, Node, Op, cost_key, peer_of
from overlap1f1b.schedule import Kind, Placement
from overlap1f1b.transport.devices import Watch, watch_of
from overlap1f1b.transport.exchange import Transfer
from overlap1f1b.transport.lanes import Flight, Lane
from overlap1f1b.transport.mesh import Mesh
from overlap1f1b.transport.streams import EventMark

Tensors = tuple[Tensor, ...]
MOST_TENSORS, MOST_DIMS = 16, 8
PLAIN, REPLICATED = -2, -1
LINK_CTAS = 1  # thread blocks of a transfer on a GPU
_DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
_NOT_NCCL = (torch.int16, torch.complex64, torch.complex128)
_HEADER = 4096  # bytes: more than the specs of the most tensors with the most dimensions take


class Spec(NamedTuple):
    """Description of a tensor between stages."""

    dtype: torch.dtype  # of the tensor
    requires_grad: bool  # whether a gradient comes back
    shape: tuple[int, ...]  # of what this rank has of it
    sharded: int = PLAIN  # dimension along which a tensor group has parts of a DTensor, or ``REPLICATED``, or ``PLAIN``
    whole: int = 0  # size of all parts along this dimension


Specs = tuple[Spec, ...]
_ABSENT = Spec(torch.bool, False, (0,))  # stands for None


def specs_of(tensors: Sequence[Tensor], requires_grad: Sequence[bool]) -> Specs:
    """Describe tensors for a header; ValueError for too many, or dimensions, or a dtype that does not travel."""
    if len(tensors) > MOST_TENSORS:
        raise ValueError(f"{len(tensors)} tensors between stages; allowed: up to {MOST_TENSORS}")
    for tensor in tensors:
        if tensor.dim() > MOST_DIMS or tensor.dtype not in _DTYPES:
            raise ValueError(
                f"a tensor of {tensor.dtype} and {tensor.dim()} dimensions between stages; "
                f"allowed: up to {MOST_DIMS} dimensions of {', '.join(str(d)[6:] for d in _DTYPES)}"
            )
    return tuple(_spec_of(t, d) for t, d in zip(tensors, requires_grad, strict=True))


def _spec_of(tensor: Tensor, requires_grad: bool) -> Spec:
    """Return what the peer must know of a tensor before it receives it."""
    if not isinstance(tensor, DTensor):
        return Spec(tensor.dtype, requires_grad, tuple(tensor.shape))
    shape = tuple(tensor.to_local().shape)
    match tensor.placements:
        case (Shard(dim=at),):
            return Spec(tensor.dtype, requires_grad, shape, at, tensor.shape[at])
        case (Replicate(),):
            return Spec(tensor.dtype, requires_grad, shape, REPLICATED)
    raise ValueError(
        f"a DTensor with placements {tensor.placements} between stages; allowed: one of Shard and Replicate, over 'tp'"
    )


def encode(specs: Specs) -> Tensor:
    """Return the header of ``specs``, uint8 of a fixed size."""
    return torch.frombuffer(bytearray(pickle.dumps(specs).ljust(_HEADER)), dtype=torch.uint8)


def summed(tensor: DTensor) -> DTensor:
    """Return a DTensor with sums in place of partial sums; all ranks of the tensor group must call this."""
    if any(placement.is_partial() for placement in tensor.placements):
        return tensor.redistribute(placements=[Replicate() if p.is_partial() else p for p in tensor.placements])
    return tensor


def local(tensor: Tensor) -> Tensor:
    """Return memory that a transfer can read: of a DTensor this rank's part, of a collective under way its result."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.wait() if isinstance(part, AsyncCollectiveTensor) else part


class _Link(NamedTuple):
    """One direction between two ranks: a group for payloads, a group for headers, and the lane of both."""

    payload: dist.ProcessGroup
    header: dist.ProcessGroup
    lane: Lane
    peer: int
    header_peer: int


class Boundary:
    """Links of one pipeline rank to the ranks of neighbouring stages along "pp", one for each direction.

    If they are ``dynamic``, shapes may change from step to step, and headers precede payloads in every step. Of
    DTensors over ``tensor_mesh`` each rank sends its part. If it ``posts_ahead``, as on gloo, receives are posted one
    ahead and threads await transfers; else receives start at their own node.
    """

    def __init__(
        self, mesh: Mesh, placement: Placement, *, device: torch.device, dynamic: bool, tensor_mesh: DeviceMesh | None
    ) -> None:
        self.mesh, self.tensor_mesh = mesh, tensor_mesh
        self._watch = watch_of(device)
        stamp = self._watch and self._watch.stamp
        self.placement, self.device, self._dynamic = placement, device, dynamic
        self.rank, pipeline = mesh.rank("pp"), mesh.along("pp")
        rank = self.rank
        self._out: dict[int, _Link] = {}
        self._in: dict[int, _Link] = {}
        self.posts_ahead = mesh.on_gloo
        # All ranks of a pipeline make its groups on gloo, which have two directions.
        headers = self._groups("header up", "header down")
        payloads = self._groups("payload up", "payload down") if self.posts_ahead else headers
        for (source, to), _ in _transfers(placement):
            if rank in (source, to):
                name, up = f"from pipeline rank {source} to {to}", source < to
                header, payload = headers[not up], payloads[not up]
                links, peer = (self._out, to) if rank == source else (self._in, source)
                number = header_peer = sorted(pipeline).index(pipeline[peer])  # groups sort their ranks
                if not self.posts_ahead:
                    two = mesh.new_group(name, pp=(source, to), over=(), ctas=LINK_CTAS, sends=rank == source)
                    assert two is not None
                    payload, number = two, 1 - two.rank()
                lane = Lane(name, mesh.failures, background=self.posts_ahead, stamp=stamp, abort=mesh.own.abort)
                links[peer] = _Link(payload, header, lane, number, header_peer)
        self._known: dict[Node, Specs] = {}  # of this step's transfers
        self._of_numbers: dict[int, dict[Node, Specs]] = {}
        self._sent: dict[tuple[Kind, int], Specs] = {}  # last of each stage
        self._of: Iterable[Node] = ()  # the nodes of the last step
        self._ahead: list[tuple[int, Node]] = []  # their receives, with the peer of each
        self._receives: dict[int, deque[Node]] = {}
        self._posted: dict[Node, Flight[Tensors]] = {}

    def _groups(self, *purposes: str) -> list[dist.ProcessGroup]:
        ranks = range(self.placement.ranks)
        groups = (self.mesh.new_group(purpose, pp=ranks, over=(), gloo=True) for purpose in purposes)
        return [group for group in groups if group is not None]

    @property
    def lanes(self) -> list[Lane]:
        """Lanes of all links."""
        return [link.lane for links in (self._out, self._in) for link in links.values()]

    def begin(self, nodes: Iterable[Node], microbatches: int, *, remember: bool) -> None:
        """Prepare a step of these nodes; where receives are posted ahead, post the first.

        All steps with ``remember`` and the same number of microbatches send the same shapes, so only the first of them
        needs headers.
        """
        self._known = {} if self._dynamic or not remember else self._of_numbers.setdefault(microbatches, {})
        self._receives, self._posted = {}, {}
        if nodes is not self._of:  # most steps play the plan of the one before
            self._of = nodes
            ahead = nodes if self.posts_ahead and self._in else ()
            self._ahead = [(peer_of(node, self.placement), node) for node in ahead if node.op is Op.RECEIVE]
        for peer, node in self._ahead:
            self._receives.setdefault(peer, deque()).append(node)
        for peer in self._receives:
            self._post_next(peer)

    def receive(self, node: Node) -> Flight[Tensors]:
        """Return the flight of a RECEIVE node; if it was posted ahead, post the peer's next one."""
        peer = peer_of(node, self.placement)
        if not self.posts_ahead:
            return self._launch(node, peer)
        self._post_next(peer)
        return self._posted.pop(node)

    def _post_next(self, peer: int) -> None:
        if self._receives[peer]:
            node = self._receives[peer].popleft()
            self._posted[node] = self._launch(node, peer)

    def _launch(self, node: Node, peer: int) -> Flight[Tensors]:
        link = self._in[peer]
        return link.lane.launch(node, partial(self._post_receive, node, link, self._known.get(node)))

    def _post_receive(self, node: Node, link: _Link, specs: Specs | None) -> Transfer[Tensors]:
        """Post the receives of a transfer, behind its header if sizes are not known."""
        if specs is None:
            specs = self._known[node] = self._read(link)
        parts = [torch.empty(spec.shape, dtype=spec.dtype, device=self.device) for spec in specs]
        works = [link.payload.recv([self._sendable(t)], link.peer, 0) for t in parts if t.numel()]
        received = tuple(map(self._as_sent, parts, specs))
        for tensor, spec in zip(received, specs, strict=True):
            tensor.requires_grad_(spec.requires_grad)
        return Transfer(received, works)

    def _read(self, link: _Link) -> Specs:
        header = torch.empty(_HEADER, dtype=torch.uint8, device="cpu")
        link.header.recv([header], link.header_peer, 0).wait(self.mesh.failures.limit)
        specs: Specs = pickle.loads(header.numpy().tobytes())
        return specs

    def _as_sent(self, part: Tensor, spec: Spec) -> Tensor:
        """Return what arrived in the form in which it was sent, in the same memory.

        A plain tensor is returned as it is, else the DTensor whose part on this rank it is.
        """
        if spec.sharded == PLAIN:
            return part
        assert self.tensor_mesh is not None
        shape = torch.Size(spec.whole if at == spec.sharded else size for at, size in enumerate(spec.shape))
        placement = Replicate() if spec.sharded == REPLICATED else Shard(spec.sharded)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(part, self.tensor_mesh, [placement], run_check=False, shape=shape, stride=stride)

    def send(self, node: Node, tensors: Tensors, requires_grad: Sequence[bool]) -> Flight[None]:
        """Send the tensors of a SEND node; ValueError for other shapes than in the first step, or an odd dtype."""
        tensors = tuple(summed(t) if isinstance(t, DTensor) else t for t in tensors)
        for tensor in tensors:
            if isinstance(tensor, DTensor) and tensor.device_mesh != self.tensor_mesh:
                raise ValueError(
                    f"stage {node.stage} passes on a DTensor over {tensor.device_mesh}; allowed: over the mesh's 'tp'"
                )
        specs = specs_of(tensors, requires_grad)
        known = self._known.get(node)
        if known is not None and specs != known:
            raise ValueError(
                f"stage {node.stage} passes on {_text(specs)}, in the first step {_text(known)}; "
                "allowed: the same, or an Engine with dynamic_shapes=True"
            )
        self._known[node] = self._sent[node.kind, node.stage] = specs
        header = encode(specs) if known is None else None
        link = self._out[peer_of(node, self.placement)]
        parts = tuple(map(local, tensors))
        return link.lane.launch(node, lambda: self._post_send(link, parts, header))

    def _post_send(self, link: _Link, tensors: Tensors, header: Tensor | None) -> Transfer[None]:
        """Post the sends of a transfer, and of its header if there is one."""
        sources = [tensor.contiguous() for tensor in tensors]
        headers = [] if header is None else [link.header.send([header], link.header_peer, 0)]
        works = [link.payload.send([self._sendable(t)], link.peer, 0) for t in sources if t.numel()]
        source = sources if header is None else [*sources, header]
        if not works:
            return Transfer(None, sends=headers, source=source)
        size = sum(tensor.nbytes for tensor in source)
        return Transfer(None, sends=works, led=headers, source=source, sent=size)  # the peer reads the header first

    def _sendable(self, tensor: Tensor) -> Tensor:
        """Return memory of a dtype that the link's backend sends: NCCL has no int16 and no complex numbers."""
        if self.posts_ahead or tensor.dtype not in _NOT_NCCL:
            return tensor
        return (torch.view_as_real(tensor) if tensor.is_complex() else tensor.reshape(-1)).view(torch.uint8)

    def timed(self) -> dict[CostKey, float]:
        """Return the seconds for which a transfer of each stage occupies its links while nothing else travels.

        In a step it shares them with exchanges of either end. Each transfer goes four times, back to back; the receiver
        takes the median of all but the first. All ranks must call this after a step.
        """
        times_of: dict[CostKey, list[Any]] = {}
        watch = self._watch or Watch(time.perf_counter, lambda begun, ended: ended - begun, lambda: None)
        failures = self.mesh.failures
        limit = None if self._watch else failures.limit  # with one, a wait for NCCL would block the thread
        for (source, to), nodes in _transfers(self.placement):
            self.mesh.sums(0.0)  # until all ranks have come
            for node in nodes if self.rank in (source, to) else ():
                if self.rank == source:
                    specs = self._sent.get((node.kind, node.stage), ())
                    parts = [torch.zeros(spec.shape, dtype=spec.dtype, device=self.device) for spec in specs]
                    self._post_send(self._out[to], tuple(4 * parts), encode(specs)).release(limit)
                else:
                    link = self._in[source]
                    specs = self._read(link)
                    times = times_of[cost_key(node)] = []
                    for transfer in [self._post_receive(node, link, specs) for _ in range(4)]:
                        transfer.receive(limit)
                        times.append(watch.stamp())
        if self._watch:
            EventMark(self.device, None, watch.stamp()).synchronize(failures)
        return {key: median(starmap(watch.between, pairwise(times))) for key, times in times_of.items()}

    def close(self) -> None:
        """Let the lanes' threads end, and drop the groups."""
        for lane in self.lanes:
            lane.close()
        self._out.clear()
        self._in.clear()

    def forget(self) -> None:
        """Forget all shapes: after a failed step ranks may know different shapes."""
        self._of_numbers.clear()


def _transfers(placement: Placement) -> list[tuple[tuple[int, int], list[Node]]]:
    """Return (source rank, destination rank) between which tensors travel, and a transfer of each kind there."""
    found: dict[tuple[int, int], list[Node]] = {}
    for pipe in placement.pipes:
        for stage, (a, b) in enumerate(pairwise(pipe)):
            if a != b:
                found.setdefault((a, b), []).append(Node(Op.SEND, Kind.F, 0, 0, stage=stage))
                found.setdefault((b, a), []).append(Node(Op.SEND, Kind.I, 0, 0, stage=stage + 1))
    return sorted(found.items(), key=itemgetter(0))


def _text(specs: Specs) -> str:
    kinds = []
    for spec in specs:
        lacks = spec.dtype.is_floating_point and not spec.requires_grad
        text = f"{str(spec.dtype)[6:]}{list(spec.shape)}{' without a gradient' * lacks}"
        kinds.append("None" if spec == _ABSENT else text)
    return ", ".join(kinds) or "nothing"
