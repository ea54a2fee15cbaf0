"""Slices as DCP reads them, and what is said of damaged files."""

import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from overlap1f1b.checkpoint import load_checkpoint, save_checkpoint
from overlap1f1b.checkpoint.tensors import Whole, check_tensors, decoded, encoded, plain_values
from overlap1f1b.schedule import build_schedule
from tests import models, products
from tests.checkpoint.runs import Tiny, ep
from tests.engines import COSTS, make
from tests.ranks import Ranks
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


def _losses(rank: int, size: int, kind: str, folder: Path, load: bool) -> list[float]:
    """Losses of four steps, of which the last two follow the checkpoint; all ranks have the same data."""
    mesh = ep(size) if size > 1 else None
    model = models.build(mesh and mesh.get_group("ep")).double()
    products.convert(model, products.KINDS[kind])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = make(model, build_schedule("combined_1f1b", microbatches=2), mesh=mesh, costs=COSTS, timeout=30.0)
    losses = []
    for step in range(load_checkpoint(engine, folder, optimizer) if load else 0, 4):
        losses.append(engine.mean_loss(engine.step(*models.batch(2, seed=step))))
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 and not load:
            save_checkpoint(engine, folder, 2, optimizer)
    assert {type(p).__name__.lower() for p in model.parameters() if p.dim() == 3} == {kind}
    return losses


@pytest.mark.parametrize("kind", products.KINDS)
def test_weights_of_another_class_go_on(ranks2: Ranks, kind: str, tmp_path: Path) -> None:
    """A file has their values, and the run that reads it has the classes."""
    expected = ranks2.run(_losses, kind, tmp_path, False)
    assert ranks2.run(_losses, kind, tmp_path, True) == [losses[2:] for losses in expected]
    assert _losses(0, 1, kind, tmp_path, True) == pytest.approx(expected[0][2:], rel=1e-9)


def test_a_class_whose_values_are_in_no_one_tensor_is_refused() -> None:
    class Two(products.Wrapped):
        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return ["held", "held"], None

    with pytest.raises(ValueError, match=r"^x is a Two in a checkpoint; allowed: a plain tensor, or a class whose"):
        plain_values(Two(torch.ones(2)), "x")


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
