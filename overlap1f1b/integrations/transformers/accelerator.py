"""accelerate's view of an overlapped trainer: its processes are the ranks that read data of their own."""

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
    def device(self) -> torch.device:
        """The rank's device: losses that move a batch there get the same tensors."""
        return unnumbered(super().device)

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
        if self._shards == 1:
            return tensor
        whole = tensor.reshape(1) if tensor.dim() == 0 else tensor.contiguous()
        parts = [torch.empty_like(whole) for _ in range(self._shards)]
        dist.all_gather(parts, whole, group=self._group)
        return torch.cat(parts)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce tensors, or nested ones, over the ranks with data of their own, as accelerate does over processes."""
        return recursively_apply(self._reduced, tensor, reduction, error_on_other_type=True)

    def _reduced(self, tensor: Tensor, reduction: str) -> Tensor:
        whole = tensor.clone()
        if self._shards > 1:
            dist.all_reduce(whole, dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM, group=self._group)
            if reduction == "mean":
                whole /= self._shards
        return whole

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Pad tensors, or nested ones, to the largest size along ``dim`` of all ranks with data of their own."""
        return recursively_apply(self._padded, tensor, dim, pad_index, pad_first, error_on_other_type=True)

    def _padded(self, tensor: Tensor, dim: int, value: float, first: bool) -> Tensor:
        if not -tensor.dim() <= dim < tensor.dim():
            return tensor
        size = list(tensor.shape)
        size[dim] = int(self._reduced(torch.tensor(size[dim], device=tensor.device), "max")) - size[dim]
        if not size[dim]:
            return tensor
        added = tensor.new_full(size, value)
        return torch.cat((added, tensor) if first else (tensor, added), dim)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather tensors, or lists of objects, without the rows that only fill the last batch of several ranks."""
        try:
            recursively_apply(lambda tensor: tensor, input_data, error_on_other_type=True)
        except TypeError:
            use_gather_object = True
        if not use_gather_object:
            return super().gather_for_metrics(input_data)
        parts = [input_data] * self._shards
        if self._shards > 1:
            dist.all_gather_object(parts, input_data, group=self._group)
        gathered, state = [one for part in parts for one in part], self.gradient_state
        return gathered[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else gathered

    def backward(self, loss: Tensor, **_: Any) -> None:
        """Keep the loss of a microbatch, whose backward the engine plays."""
        self.loss = loss


def unnumbered(device: torch.device) -> torch.device:
    """Return the CPU without the number that a launcher gives it: moving a tensor to "cpu:1" would copy it."""
    return torch.device("cpu") if device.type == "cpu" else device
