"""Tensors of a checkpoint, as torch.distributed.checkpoint (DCP) stores and reads them.

    whole = Slice(weight, rank=1, ranks=4)  # the second quarter of the rows
    whole.shape  # of all four

DCP asks a slice where its part lies, by the three methods that DTensor has, too. So a slice may itself be a DTensor,
which FSDP2 has sharded further.
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
from torch.distributed.tensor import DTensor

from overlap1f1b.engine.checkpoint.folder import damaged
from overlap1f1b.schedule.values import quoted
from overlap1f1b.transport.failures import headline

INDEX = ".metadata"
Index = Mapping[str, TensorStorageMetadata]
"""Shape and dtype of each tensor."""


def read_index(checkpoint: Path, files: Collection[str]) -> Index:
    """Return shapes and dtypes of a checkpoint's tensors, by name; ``files`` are the names of its files.

    Raises:
        ValueError: The index cannot be read, or names another file.
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
    """Fill tensors from a checkpoint, on this rank alone.

    Raises:
        ValueError: A file is damaged.
    """
    try:
        with warnings.catch_warnings():
            # DCP warns of the documented `no_dist=True`.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            state_dict_loader.load(tensors, storage_reader=FileSystemReader(checkpoint), no_dist=True)
    except CheckpointException as error:
        (cause, _), *_ = error.failures.values()
        raise damaged(checkpoint, headline(cause)) from None


class Slice(Tensor):
    """A whole tensor, of which this rank has slice number ``rank`` of ``ranks`` equal slices along dimension 0.

    It computes nothing, and shares the memory of the slice, ``tensor``, which may be a DTensor.
    """

    @staticmethod
    def __new__(cls, tensor: Tensor, rank: int, ranks: int) -> Slice:
        """Return a tensor without memory of its own."""
        shape = (tensor.shape[0] * ranks, *tensor.shape[1:])
        return Tensor._make_wrapper_subclass(cls, shape, dtype=tensor.dtype, device=tensor.device)

    def __init__(self, tensor: Tensor, rank: int, ranks: int) -> None:
        self.local, offsets = tensor.detach(), [0] * tensor.ndim
        if isinstance(self.local, DTensor):
            (chunk,) = self.local.__create_chunk_list__()  # where DTensor's own part lies
            self.local, offsets = self.local.to_local(), list(chunk.offsets)
        offsets[0] += rank * tensor.shape[0]
        self._chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=self.local.shape)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{function} of a slice")

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        # An empty part begins where the next slice does, which DCP would take for the same part.
        return [self._chunk] if self.local.numel() else []

    def __get_tensor_shard__(self, _: MetadataIndex) -> Tensor:
        return self.local


def zeros_like_rows(tensor: Tensor, row: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return zeros with the rows of ``tensor``, sharded as it is, each of shape ``row``."""
    shape = (*tensor.shape[:1], *row)
    if not isinstance(tensor, DTensor):
        return torch.zeros(shape, dtype=dtype, device=tensor.device)
    own = tensor.to_local()
    own_shape = own.shape if shape == tensor.shape else (*own.shape[:1], *row)
    return DTensor.from_local(
        torch.zeros(own_shape, dtype=dtype, device=own.device),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )
