"""The tensors of a checkpoint: their index, and what is in them."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from overlap1f1b.engine.checkpoint.folder import damaged
from overlap1f1b.schedule.values import quoted
from overlap1f1b.transport.failures import headline

INDEX = ".metadata"
Index = Mapping[str, TensorStorageMetadata]
"""Shape and dtype of each tensor."""


def read_index(checkpoint: Path, files: Collection[str]) -> Index:
    """Return shapes and dtypes of a checkpoint's tensors, by name.

    Args:
        checkpoint: Folder of the checkpoint.
        files: Names of its files, which were checked.

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
