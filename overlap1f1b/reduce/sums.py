"""Sum gradients of plain modules over the ranks that hold the same parameters."""

from collections.abc import Mapping, Sequence, Set

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from overlap1f1b.cut.stage import Stage
from overlap1f1b.plan import Node, Op
from overlap1f1b.reduce.reduction import BlockKey, Reduction
from overlap1f1b.transport import devices
from overlap1f1b.transport.exchange import Transfer
from overlap1f1b.transport.lanes import Flight, Lane, Post
from overlap1f1b.transport.streams import DeviceStream

LARGE_BYTES = 1 << 20
"""On gloo a sum of its own costs a gradient of this size less than the copies of a common one."""


class Reducer(Reduction):
    """One all-reduce a block, launched when the block's last contribution is in, so that the rest of the step hides it.

    Gradients are summed where they are, without a copy. Those of earlier steps are not reduced again: they are set
    aside meanwhile.

    ``dense`` are the ranks that hold the same parameters outside the experts, ``experts`` the ranks that hold the same
    experts; None for this rank alone. Another reduction sums the parameters ``apart``.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        dense: dist.ProcessGroup | None,
        experts: dist.ProcessGroup | None,
        lane: Lane,
        *,
        apart: Set[nn.Parameter] = frozenset(),
    ) -> None:
        super().__init__()
        self.stages, self.dense, self.experts, self.lane, self.apart = stages, dense, experts, lane, apart
        self._sums = self._found()
        self.reduces = any(parameters for sums in self._sums.values() for parameters, _ in sums)
        """Whether any gradient has to be summed."""
        self._of: Sequence[Node] = ()  # the order of the last step
        self._places: list[BlockKey] = []  # of its reductions, last first
        self._order: list[BlockKey] = []  # of the launches still to come, last first
        self._ready: dict[BlockKey, Node] = {}
        self._summed_at: dict[nn.Parameter, BlockKey] = {}  # the last of the blocks that share it
        self._stream: DeviceStream | None = None

    def _found(self) -> dict[BlockKey, list[tuple[list[nn.Parameter], dist.ProcessGroup]]]:
        """Return the parameters that are summed with each block, with the ranks of each sum."""
        found = {}
        for number, stage in self.stages.items():
            for block in range(len(stage.blocks)):
                dense, experts = stage.dense_parameters_of(block), stage.expert_parameters_of(block)
                both = (dense, self.dense), (experts, self.experts)
                found[number, block] = [
                    ([p for p in part if p not in self.apart], group) for part, group in both if group is not None
                ]
        return found

    def begin(self, order: Sequence[Node]) -> None:
        if order is not self._of:  # most steps play the plan of the one before
            self._of = order
            self._places = [(node.stage, node.block) for node in reversed(order) if node.op is Op.REDUCE]
        self._sums = self._found()  # in each step: a user may mark experts after the Engine is made
        self._order = [place for place in self._places if place in self._sums]
        self._ready, self._flights, self._summed_at = {}, [], {}
        for place in reversed(self._order):
            self._summed_at |= dict.fromkeys((p for part, _ in self._sums[place] for p in part), place)
        self._aside.take(self._summed_at)

    def launch(self, node: Node) -> list[Flight[list[Tensor]]]:
        # Of this block, and of blocks that waited for their turn behind it.
        self._ready[node.stage, node.block] = node
        launched = []
        while self._order and self._order[-1] in self._ready:
            place = self._order.pop()
            for parameters, group in self._sums[place]:
                by_dtype: dict[torch.dtype, list[Tensor]] = {}
                for parameter in dict.fromkeys(p for p in parameters if self._summed_at[p] == place):
                    by_dtype.setdefault(parameter.dtype, []).append(_own_gradient(parameter))
                for grads in by_dtype.values():
                    launched.append(self.lane.launch(self._ready[place], self._all_reduce(grads, group)))
        self._flights += launched
        return launched

    def _all_reduce(self, grads: list[Tensor], group: dist.ProcessGroup) -> Post[list[Tensor]]:
        if devices.gpu_of(grads[0].device) is None:
            return lambda: Transfer(grads, _started(grads, group))
        stream = self._stream = self._stream or DeviceStream(grads[0].device, priority=0)
        # Gradients outlive the job by construction: the flight holds them until finish() waits.
        return lambda: Transfer(grads, mark=stream.run(lambda *held: _sum(held, group), *grads))

    def finish(self) -> None:
        assert not self._order, f"no reduction of {self._order} in the plan"
        super().finish()


def _own_gradient(parameter: nn.Parameter) -> Tensor:
    """Return a parameter's ``.grad``, dense and in memory of its own, so that it can be summed in place.

    An embedding's may be sparse. Of a DTensor it is this rank's part: ranks with the same part sum.
    """
    grad = parameter.grad
    if grad is None:  # no token of this rank reached it; another rank's may have
        grad = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    elif grad.layout is not torch.strided:
        grad = grad.to_dense()
    elif not grad.is_contiguous() or _shared(grad.to_local() if isinstance(grad, DTensor) else grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
    parameter.grad = grad
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _shared(grad: Tensor) -> bool:
    """Return whether another tensor has the same memory: autograd takes a view of a gradient that others still need."""
    return torch._C._storage_Use_Count(grad.untyped_storage()._cdata) > 2  # the tensor's, and this call's


def _started(grads: Sequence[Tensor], group: dist.ProcessGroup) -> list[dist.Work]:
    """Start the sum on gloo: large gradients in place, small ones together, which gloo copies meanwhile."""
    large = [grad for grad in grads if grad.nbytes >= LARGE_BYTES]
    small = [grad for grad in grads if grad.nbytes < LARGE_BYTES]
    works = [group.allreduce([grad]) for grad in large]
    return [*works, group.allreduce_coalesced(small, dist.AllreduceCoalescedOptions())] if small else works


def _sum(grads: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sum in place on the current stream, all in one call."""
    options = dist.AllreduceCoalescedOptions()
    options.asyncOp = False
    group.allreduce_coalesced(list(grads), options)
