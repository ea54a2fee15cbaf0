"""Slices as DCP reads them, and what is said of damaged files."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from overlap1f1b.checkpoint.tensors import Whole, check_tensors, decoded, encoded
from tests.checkpoint.runs import Tiny
from tests.tiers import wide


def test_a_whole_has_the_shape_of_all_slices_and_the_memory_of_one() -> None:
    slice_ = torch.arange(12.0).view(2, 6)
    rows, columns = Whole(slice_, 1, 3), Whole(slice_, 1, 3, columns=2)
    assert (rows.shape, columns.shape) == ((6, 6), (2, 18))
    for whole, at in ((rows, [(2, 0)]), (columns, [(0, 2), (0, 8), (0, 14)])):
        items = whole.__create_write_items__("x", whole)
        assert [tuple(item.index.offset or ()) for item in items] == at
        parts = [whole.__get_tensor_shard__(item.index) for item in items]
        assert torch.equal(torch.cat(parts, 1), slice_)
        assert all(part.untyped_storage().data_ptr() == slice_.untyped_storage().data_ptr() for part in parts)
    with pytest.raises(NotImplementedError, match="of a whole"):
        rows + 1


def test_values_are_bytes() -> None:
    value = {"a": [1, (2.5, None)], "tensor": torch.arange(3)}
    assert repr(decoded(encoded(value))) == repr(value)
    with pytest.raises(pickle.UnpicklingError):
        decoded(encoded(Tiny()))


def flip(path: Path) -> None:
    """Change one bit of a stored tensor's numbers."""
    index = FileSystemReader(path.parent).read_metadata().storage_data
    offset = next(info.offset for info in index.values() if info.relative_path == path.name)
    content = bytearray(path.read_bytes())
    filler = content.index(b"FB", content.index(b"data/0", offset)) + 2  # its length, and so many letters
    content[filler + 2 + int.from_bytes(content[filler : filler + 2], "little")] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    """Leave the beginning of a file."""
    path.write_bytes(path.read_bytes()[:100])


def rename(path: Path) -> None:
    """Name a class in an index that this torch does not have."""
    path.write_bytes(path.read_bytes().replace(b"TensorStorageMetadata", b"TensorStorageMetaDATA"))


@pytest.mark.parametrize(
    ("name", "harm", "why"),
    [
        (
            "__0_0.distcp",
            flip,
            r"\S+ in __0_0\.distcp cannot be read \(BadZipFile: it has other bytes than were written",
        ),
        (".metadata", rename, rf"torch {re.escape(torch.__version__)} cannot read its index \(AttributeError"),
        *wide(
            ("__0_0.distcp", cut, r"\S+ in __0_0\.distcp cannot be read \(BadZipFile"),
            ("__0_0.distcp", Path.unlink, r"\S+ in __0_0\.distcp cannot be read \(FileNotFoundError"),
            (".metadata", cut, r"torch \S+ cannot read its index \("),
            (".metadata", Path.unlink, r"torch \S+ cannot read its index \(FileNotFoundError"),
        ),
    ],
)
def test_damage_is_named(tmp_path: Path, name: str, harm: Callable[[Path], object], why: str) -> None:
    path = Tiny().save(tmp_path, 1)
    check_tensors(path)
    harm(path / name)
    model = Tiny(seed=1)
    before = model.state()
    with pytest.raises(ValueError, match=rf"^checkpoint {path} is damaged: {why}[^\n]*; remove it to resume from an"):
        model.load(path)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state().items())
