"""Tensors of a checkpoint, as torch.distributed.checkpoint (DCP) stores and reads them.

    whole = Whole.of_slices(weight, rank=1, ranks=4)  # of which this rank has the second quarter of the rows
    whole.shape  # of all four

DCP asks a whole where this rank's parts lie, by the three methods that DTensor has, too. A DTensor would need one mesh
with the experts' ranks and, inside these, those of FSDP2; torch cuts none out of a mesh with another order. Here the
slice may itself be a DTensor, over any mesh.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, zeros

from overlap1f1b.checkpoint.folder import damaged
from overlap1f1b.schedule.values import quoted
from overlap1f1b.transport.failures import headline

INDEX = ".metadata"
Index = Mapping[str, TensorStorageMetadata]
"""Shape and dtype of each tensor."""


def read_index(checkpoint: Path, files: Collection[str]) -> Index:
    """Return shapes and dtypes of a checkpoint's tensors, by name; ``files`` are the names of its files.

    An index that cannot be read, or names another file, is a ValueError.
    """
    try:  # a pickle of torch's own classes, which change
        metadata = FileSystemReader(checkpoint).read_metadata()
        kept = {storage.relative_path for storage in metadata.storage_data.values()}
    except Exception as error:  # unpickling raises whatever the classes do
        why = f"torch {torch.__version__} cannot read its index ({type(error).__name__})"
        raise damaged(checkpoint, why) from None
    if unlisted := sorted({INDEX, *kept} - set(files)):
        raise damaged(checkpoint, f"its list of files has no {quoted(unlisted[0], plain=True)}")
    every = metadata.state_dict_metadata.items()
    return {key: meta for key, meta in every if isinstance(meta, TensorStorageMetadata)}


def read_tensors(checkpoint: Path, tensors: dict[str, Tensor]) -> None:
    """Fill tensors from a checkpoint, on this rank alone; a damaged file is a ValueError."""
    try:
        with warnings.catch_warnings():
            # DCP warns of the documented `no_dist=True`.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            state_dict_loader.load(tensors, storage_reader=FileSystemReader(checkpoint), no_dist=True)
    except CheckpointException as error:
        (cause, _), *_ = error.failures.values()
        raise damaged(checkpoint, headline(cause)) from None


class Whole(Tensor):
    """A whole tensor of ``shape``, of which this rank has parts, by their offsets.

    It computes nothing, and shares the memory of the parts.
    """

    @staticmethod
    def __new__(cls, shape: Sequence[int], parts: Mapping[torch.Size, Tensor]) -> Whole:
        """Return a tensor without memory of its own."""
        part = next(iter(parts.values()))
        return Tensor._make_wrapper_subclass(cls, shape, dtype=part.dtype, device=part.device)

    def __init__(self, shape: Sequence[int], parts: Mapping[torch.Size, Tensor]) -> None:
        # An empty part begins where the next one does, which DCP would take for the same part.
        self._parts = {at: part for at, part in parts.items() if part.numel()}

    @classmethod
    def of_slices(cls, tensor: Tensor, rank: int, ranks: int, columns: int | None = None) -> Whole:
        """Return the whole of ``ranks`` equal slices along dimension 0, of which ``tensor`` is number ``rank``.

        With ``columns`` the slices are along dimension 1 instead, in each group of so many columns of ``tensor``.
        """
        local, row = tensor.detach(), 0
        if isinstance(local, DTensor):
            (chunk,) = local.__create_chunk_list__()  # where DTensor's own part lies
            local, row = local.to_local(), chunk.offsets[0]
        if columns is None:
            at = torch.Size([row + rank * tensor.shape[0], *[0] * (tensor.ndim - 1)])
            return cls((tensor.shape[0] * ranks, *tensor.shape[1:]), {at: local})
        parts = enumerate(local.split(columns, 1))
        found = {torch.Size([row, (number * ranks + rank) * columns]): part for number, part in parts}
        return cls((tensor.shape[0], tensor.shape[1] * ranks), found)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{function} of a whole")

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        items = []
        for chunk in self.__create_chunk_list__():
            properties = TensorProperties.create_from_tensor(self._parts[chunk.offsets])
            data = TensorWriteData(chunk, properties, self.size())
            items.append(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=at, sizes=part.shape) for at, part in self._parts.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self._parts[index.offset]


def zeros_like_rows(tensor: Tensor, row: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return zeros with the rows of ``tensor``, sharded as it is, each of shape ``row``."""
    shape = (*tensor.shape[:1], *row)
    if shape == tensor.shape:
        return torch.zeros_like(tensor, dtype=dtype, requires_grad=False)
    if isinstance(tensor, DTensor):
        return zeros(*shape, dtype=dtype, device_mesh=tensor.device_mesh, placements=tensor.placements)
    return tensor.new_zeros(shape, dtype=dtype)
