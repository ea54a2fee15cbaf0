"""Tensors of a checkpoint, as torch.distributed.checkpoint (DCP) stores and reads them.

    whole = Whole(weight, rank=1, ranks=4)  # of which this rank has the second quarter of the rows
    whole.shape  # of all four

DCP asks a whole where this rank's parts lie, by the three methods that DTensor has, too. A DTensor would need one mesh
with the experts' ranks and, inside these, those of FSDP2; torch cuts none out of a mesh with another order. Here the
slice may itself be a DTensor, over any mesh.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, cast
from zipfile import BadZipFile, ZipFile

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from overlap1f1b.transport.failures import headline

FACTS = "run"
"""Name of the bytes that have what is no tensor: step, configuration, layout and the optimizer's table."""
Index = Mapping[str, TensorStorageMetadata]
"""Shape and dtype of each tensor."""


def read_index(checkpoint: Path) -> Index:
    """Return shapes and dtypes of a checkpoint's tensors, by name; a missing or damaged checkpoint is a ValueError."""
    return cast(Index, _metadata(checkpoint).state_dict_metadata)


def check_tensors(checkpoint: Path, rank: int = 0, ranks: int = 1) -> None:
    """Compare a rank's share of the tensors with their CRC-32, which torch does not read; else ValueError."""
    stored = _metadata(checkpoint).storage_data
    for index in list(stored)[rank::ranks]:
        at = stored[index]
        try:
            with (checkpoint / at.relative_path).open("rb") as file:
                file.seek(at.offset)
                content = ZipFile(BytesIO(file.read(at.length)))
            if content.testzip() is not None:
                raise BadZipFile("it has other bytes than were written")
        except Exception as error:  # zipfile raises whatever the bytes ask for
            why = f"{index.fqn} in {at.relative_path} cannot be read ({headline(error)})"
            raise damaged(checkpoint, why) from None


def _metadata(checkpoint: Path) -> Metadata:
    if not checkpoint.exists():
        raise ValueError(f"checkpoint {checkpoint} does not exist")
    try:  # a pickle of torch's own classes, which change
        return FileSystemReader(checkpoint).read_metadata()
    except Exception as error:  # unpickling raises whatever the classes do
        raise damaged(checkpoint, f"torch {torch.__version__} cannot read its index ({headline(error)})") from None


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


def damaged(checkpoint: Path, why: str) -> ValueError:
    """Return the error for a checkpoint that cannot be read."""
    return ValueError(
        f"checkpoint {checkpoint} is damaged: {why}; remove it to resume from an earlier one, "
        "or use another checkpoint folder"
    )


def empty(stored: TensorStorageMetadata, device: torch.device | str = "cpu") -> Tensor:
    """Return a tensor for all of a stored one."""
    return torch.empty(stored.size, dtype=stored.properties.dtype, device=device)


def encoded(value: Any) -> Tensor:
    """Return a value as bytes, a file that ``torch.load(weights_only=True)`` reads."""
    torch.save(value, file := BytesIO())
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def decoded(content: Tensor) -> Any:
    """Return the value of :func:`encoded`: tensors on the CPU, numbers, texts, and containers of these."""
    return torch.load(BytesIO(content.numpy().tobytes()), weights_only=True, map_location="cpu")


def plain_values(tensor: Tensor, what: str) -> Tensor:
    """Return a tensor of torch's own class that shares the memory of one of another class; of a DTensor its local part.

    A file would else hold an object of that class, which cannot be read. ValueError if nothing says where it has
    values.
    """
    if isinstance(tensor, DTensor):
        local, mesh = tensor.to_local(), tensor.device_mesh
        if (values := plain_values(local, what)) is local:
            return tensor
        shape: dict[str, Any] = {"shape": tensor.shape, "stride": tensor.stride()}
        return DTensor.from_local(values, mesh, tensor.placements, run_check=False, **shape)
    kind: Any = type(tensor)
    if kind is Tensor or kind is nn.Parameter:
        return tensor
    if kind.__torch_dispatch__ is Tensor.__torch_dispatch__:  # its functions are its own, its memory is not
        return tensor.as_subclass(Tensor)
    names: Sequence[str] = tensor.__tensor_flatten__()[0] if is_traceable_wrapper_subclass(tensor) else ()
    inside = [getattr(tensor, name) for name in names]
    if len(inside) != 1 or (inside[0].shape, inside[0].dtype) != (tensor.shape, tensor.dtype):
        raise ValueError(
            f"{what} is a {kind.__name__} in a checkpoint; allowed: a plain tensor, or a class whose "
            "__tensor_flatten__ names one tensor, of its shape and dtype"
        )
    return plain_values(inside[0], what)


def checksum(tensor: Tensor) -> int:
    """Return the CRC-32 of a tensor's bytes."""
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(content.numpy().tobytes())


class Whole(Tensor):
    """The whole of ``ranks`` equal slices along dimension 0, of which this rank has number ``rank``, ``tensor``.

    With ``columns`` they are along dimension 1, in each group of so many columns. It computes nothing, and shares the
    memory of the slice, perhaps a DTensor.
    """

    @staticmethod
    def __new__(cls, tensor: Tensor, rank: int, ranks: int, columns: int | None = None) -> Whole:
        """Return a tensor without memory of its own."""
        shape = list(tensor.shape)
        shape[0 if columns is None else 1] *= ranks
        return Tensor._make_wrapper_subclass(cls, shape, dtype=tensor.dtype, device=tensor.device)

    def __init__(self, tensor: Tensor, rank: int, ranks: int, columns: int | None = None) -> None:
        local, row = tensor.detach(), 0
        if isinstance(local, DTensor):
            (chunk,) = local.__create_chunk_list__()  # where DTensor's own part lies
            local, row = local.to_local(), chunk.offsets[0]
        if columns is None:
            parts = {(row + rank * tensor.shape[0], *[0] * (tensor.ndim - 1)): local}
        else:
            parts = {(row, (n * ranks + rank) * columns): part for n, part in enumerate(local.split(columns, 1))}
        # An empty part begins where the next one does, which DCP would take for the same part.
        self._parts = {torch.Size(at): part for at, part in parts.items() if part.numel()}

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
