"""The accelerator of a trainer whose ranks do not all have data of their own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils.operations import recursively_apply
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


class ShardedAccelerator(Accelerator):
    """An accelerator whose processes are the ranks with data of their own: "dp" × "ep", the same along "pp".

    So data loaders, counts of tokens and gathered metrics treat the ranks of a pipeline as one. Gradients are the
    engine's: :meth:`backward` only keeps the loss that it is given.
    """

    loss: Tensor | None = None
    """Loss of the microbatch that was last given to :meth:`backward`, with its graph."""
    _group: Any = None
    _shards = 1
    _shard = 0

    def share(self, mesh: DeviceMesh | None) -> None:
        """Set the ranks that have data; ``mesh`` has the dimensions "pp", "dp" and "ep", None for one rank."""
        self.dataloader_config.dispatch_batches = False  # each rank reads its own data
        if mesh is not None:
            data = mesh["dp", "ep"]._flatten("data")
            self._group, self._shards, self._shard = data.get_group(), data.size(), data.get_local_rank()

    @property
    def num_processes(self) -> int:
        """Number of ranks with data of their own."""
        return self._shards

    @property
    def process_index(self) -> int:
        """Number of this rank among these; the same along "pp"."""
        return self._shard

    def gather(self, tensor: Any) -> Any:
        """Concatenate tensors, or nested ones, of the ranks with data of their own along the first dimension."""
        return recursively_apply(self._gathered, tensor, error_on_other_type=True)

    def _gathered(self, tensor: Tensor) -> Tensor:
        whole = tensor.reshape(1) if tensor.dim() == 0 else tensor.contiguous()
        if self._shards == 1:
            return tensor
        parts = [torch.empty_like(whole) for _ in range(self._shards)]
        dist.all_gather(parts, whole, group=self._group)
        return torch.cat(parts)

    def backward(self, loss: Tensor, **_: Any) -> None:
        """Keep the loss of a microbatch, whose backward the engine plays."""
        self.loss = loss
