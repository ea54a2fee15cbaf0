"""Text to train on, as bytes, so that the vocabulary is 256; by default the sources of the standard library.

corpus = Corpus.load(sequence=256)              # the standard library's sources of the running interpreter
corpus = Corpus.load([Path("notes")], sequence=256)
inputs, targets = corpus.batch(step=7, rank=0, batch=4, sequence=256, seed=0)   # int64 [B, S] each
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

LIMIT_BYTES = 32 * 2**20
ALLOWED = "allowed: text files, or folders of them"
BINARY_PROBE = 8 * 2**10  # a zero byte this early marks a file as binary
NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})


@dataclass(frozen=True, eq=False)
class Corpus:
    """Text in two parts without a common byte. `str(corpus)` is a summary in one line.

    train, held_out: uint8 [bytes], files one after another with nothing between them.
    name: the source of the text.
    files, held_out_files: the number of files in each part (a file in both parts counts in both).
    limited: whether reading stopped at `limit_bytes`.
    """

    train: Tensor
    held_out: Tensor
    name: str
    files: int
    held_out_files: int
    limited: bool

    @classmethod
    def load(
        cls,
        paths: Sequence[Path] = (),
        *,
        held_out: float = 0.05,
        limit_bytes: int = LIMIT_BYTES,
        sequence: int,
    ) -> Corpus:
        """Read `paths` (files, and folders with all their files), or by default the standard library's sources.

        Folders are walked in sorted order without hidden and binary files, and each file is read once. Reading stops
        after `limit_bytes`. Every n-th file is held out, n = 1 / `held_out`; if that is less than half or
        more than twice this share of the text, the end of the text is held out instead.

        Raises:
            ValueError: A path does not exist, cannot be read or has no text; or the text is too short for one window of
                `sequence` + 1 bytes to train on and one held out.
        """
        name = ", ".join(map(str, paths)) or f"standard library of Python {platform.python_version()}"
        texts, total, limited = [], 0, False
        for text in _given(paths, limit_bytes) if paths else _standard_library(limit_bytes):
            limited = total + len(text) > limit_bytes
            if part := text[: limit_bytes - total]:
                texts.append(part)
                total += len(part)
            if limited:
                break
        window = sequence + 1
        if total < 2 * window:
            raise ValueError(
                f"text {name} is too short: {total} bytes, where sequence={sequence} needs {window} to train on "
                f"and {window} held out; use a longer text or a shorter sequence"
            )
        every = round(1 / held_out)
        held = texts[every - 1 :: every]
        train = [text for index, text in enumerate(texts, 1) if index % every]
        held_bytes = sum(map(len, held))
        fair = held_out / 2 <= held_bytes / total <= held_out * 2
        if fair and min(held_bytes, total - held_bytes) >= window:
            return cls(_tensor(b"".join(train)), _tensor(b"".join(held)), name, len(train), len(held), limited)
        whole, at = b"".join(texts), min(max(round((1 - held_out) * total), window), total - window)
        ends = list(accumulate(map(len, texts)))
        before, behind = sum(start < at for start in (0, *ends[:-1])), sum(end > at for end in ends)
        return cls(_tensor(whole[:at]), _tensor(whole[at:]), name, before, behind, limited)

    def __str__(self) -> str:
        limit = " (limited)" if self.limited else ""
        return (
            f"{self.name}{limit}: {len(self.train) / 1e6:.2f} MB of {self.files} files to train on, "
            f"{len(self.held_out) / 1e6:.2f} MB of {self.held_out_files} files held out"
        )

    @property
    def unigram_entropy(self) -> float:
        """Loss on the held-out text, in nats per byte, of a model that knows only how often each byte occurs.

        It is the cross-entropy of the held-out bytes under the byte frequencies of the training part, with one added to
        each of the 256 counts, so that it stays finite. A model that uses the context has a lower loss.
        """
        seen = torch.bincount(self.train, minlength=256).double() + 1
        asked = torch.bincount(self.held_out, minlength=256).double()
        return float(-(asked @ (seen / seen.sum()).log()) / asked.sum())

    @property
    def digest(self) -> str:
        """Hash of the text and its split in sixteen hexadecimal digits, which a resumed run must share."""
        digest = hashlib.sha256(len(self.train).to_bytes(8, "little"))
        for part in (self.train, self.held_out):
            digest.update(part.numpy().data)
        return digest.hexdigest()[:16]

    def batch(self, step: int, rank: int, *, batch: int, sequence: int, seed: int) -> tuple[Tensor, Tensor]:
        """Return random windows of the training part: inputs and targets, int64 [B, S], targets one byte ahead.

        They depend on (seed, step, rank) alone, by a hash, so that a resumed run needs no state, and another release of
        torch gives the same windows.
        """
        positions = len(self.train) - sequence
        assert positions > 0
        keys = (f"{seed} {step} {rank} {row}".encode() for row in range(batch))
        starts = [int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") % positions for key in keys]
        return _windows(self.train, starts, sequence)

    def held_out_batches(
        self, rank: int, ranks: int, batch: int, sequence: int, limit: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's share of evenly spaced windows of the held-out part, in pairs as `batch` returns them.

        There are at most `limit` windows in all, without overlap. Their number is rounded down to a multiple of ranks ×
        batch, since ranks that exchange tokens must run equally many batches; with a limit of such a multiple, and a
        text that is long enough, any number of ranks has the same windows. With less than one batch per rank, each rank
        gets one batch, and windows overlap.
        """
        last = len(self.held_out) - sequence - 1
        assert last >= 0
        apart = (len(self.held_out) - 1) // sequence
        wanted = apart if limit is None else min(limit, apart)
        count = max(wanted // (ranks * batch), 1) * ranks * batch
        starts = [i * last // max(count - 1, 1) for i in range(count)][rank::ranks]
        for first in range(0, len(starts), batch):
            yield _windows(self.held_out, starts[first : first + batch], sequence)


def _windows(text: Tensor, starts: Sequence[int], sequence: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, int64 [len(starts), sequence], of the windows that begin at `starts`."""
    windows = text[torch.tensor(starts)[:, None] + torch.arange(sequence + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def _tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


# Each function yields the bytes of one file after another, of a file at most one byte more than the limit.


def _standard_library(limit: int) -> Iterator[bytes]:
    """Yield the standard library's modules, without its tests and unreadable files."""
    for path in _walk(Path(sysconfig.get_path("stdlib")), skip=NOT_LIBRARY):
        if path.suffix == ".py":
            with suppress(OSError):
                yield _read(path, limit)


def _given(paths: Sequence[Path], limit: int) -> Iterator[bytes]:
    """Yield the text of `paths`, each file once. All paths are checked before the first is read."""

    def refuse(error: OSError, what: str = "folder") -> NoReturn:
        raise ValueError(f"text {what} {error.filename} cannot be read: {error.strerror}; leave it out")

    for path in paths:
        if not (path.is_file() or path.is_dir()):
            why = "is neither a file nor a folder" if path.exists() else "does not exist"
            raise ValueError(f"--text {path} {why}; {ALLOWED}")
    seen: set[Path] = set()
    for path in paths:
        named = path.is_file()
        some = False
        for file in [path] if named else _walk(path, refuse):
            try:
                content = _read(file, limit)
            except OSError as error:
                refuse(error, "file")
            why = "is binary (a zero byte in its first 8 KiB)" if b"\0" in content[:BINARY_PROBE] else ""
            why = why if content else "is empty"
            if named and why:
                raise ValueError(f"--text {path} {why}; {ALLOWED}")
            some = some or not why
            if not why and file.resolve() not in seen:
                seen.add(file.resolve())
                yield content
        if not some:
            raise ValueError(f"--text {path} holds no text: it has no files, or only hidden, empty or binary ones")


def _read(path: Path, limit: int) -> bytes:
    """Return the first `limit` + 1 bytes, since a file may have any size. Sockets and pipes count as empty."""
    if path.exists() and not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.read(limit + 1)


def _walk(
    folder: Path, onerror: Callable[[OSError], None] | None = None, skip: frozenset[str] = frozenset()
) -> Iterator[Path]:
    """Yield the files below `folder` in sorted order, without hidden ones and without folders named in `skip`."""
    for parent, folders, files in os.walk(folder, onerror=onerror):
        folders[:] = sorted(name for name in folders if name not in skip and not name.startswith("."))
        yield from (Path(parent, name) for name in sorted(files) if not name.startswith("."))
