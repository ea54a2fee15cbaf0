"""Text to train on, as bytes, so that the vocabulary is 256; by default the sources of the standard library.

corpus = Corpus.load(sequence=256)              # the standard library's sources of the running interpreter
corpus = Corpus.load([Path("notes")], sequence=256)
inputs, targets = corpus.batch(step=7, rank=0, batch=4, seed=0)   # int64 [B, S] each
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

ALLOWED = "allowed: text files that can be read, or folders of them"
BINARY_PROBE = 8 * 2**10  # a zero byte this early marks a file as binary
NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})


@dataclass(frozen=True, eq=False)
class Corpus:
    """Text in two parts without a common byte. `str(corpus)` is a summary in one line."""

    train: Tensor  # uint8 [bytes], files one after another with nothing between them
    held_out: Tensor
    name: str  # the source of the text
    sequence: int  # bytes of the inputs of a window

    @classmethod
    def load(
        cls, paths: Sequence[Path] = (), *, held_out: float = 0.05, limit_bytes: int = 32 * 2**20, sequence: int
    ) -> Corpus:
        """Read `paths` (files, and folders with all their files), or by default the standard library's sources.

        Folders are walked in sorted order without hidden and binary files, and each file is read once. Reading stops
        after `limit_bytes`. The last `held_out` of the text, as a share, is held out.

        Raises:
            ValueError: A path does not exist, cannot be read or has no text; or the text is too short for one window of
                `sequence` + 1 bytes to train on and one held out.
        """
        name = ", ".join(map(str, paths)) or f"standard library of Python {platform.python_version()}"
        whole = bytearray()
        for text in _files(paths, limit_bytes) if paths else _standard_library(limit_bytes):
            whole += text
            if len(whole) > limit_bytes:
                del whole[limit_bytes:]
                name += f", the first {limit_bytes / 1e6:.3g} MB"
                break
        total, window = len(whole), sequence + 1
        if total < 2 * window:
            raise ValueError(
                f"--sequence {sequence} with a text of {total} bytes ({name}); allowed: {window} or more to train on, "
                "and as many held out, by a longer --text or a shorter --sequence"
            )
        at = min(max(round((1 - held_out) * total), window), total - window)
        content = torch.frombuffer(whole, dtype=torch.uint8)
        return cls(content[:at], content[at:], name, sequence)

    def __str__(self) -> str:
        train, held_out = (len(part) / 1e6 for part in (self.train, self.held_out))
        return f"{self.name}: {train:.2f} MB to train on, {held_out:.2f} MB held out"

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

    def batch(self, step: int, rank: int, *, batch: int, seed: int) -> tuple[Tensor, Tensor]:
        """Return random windows of the training part: inputs and targets, int64 [B, S], targets one byte ahead.

        They depend on (seed, step, rank) alone, by a hash, so that a resumed run needs no state, and another release of
        torch gives the same windows.
        """
        positions = len(self.train) - self.sequence
        keys = (f"{seed} {step} {rank} {row}".encode() for row in range(batch))
        starts = [int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") % positions for key in keys]
        return self._windows(self.train, starts)

    def held_out_batches(self, rank: int, ranks: int, batch: int, limit: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's share of evenly spaced windows of the held-out part, in pairs as `batch` returns them.

        There are at most `limit` in all, rounded down to a multiple of ranks × batch, since ranks that exchange tokens
        must run equally many batches; so numbers of ranks that divide it see the same text. Each rank gets one batch at
        least, of windows that may then overlap.
        """
        last = len(self.held_out) - self.sequence - 1
        apart = (len(self.held_out) - 1) // self.sequence
        count = max(min(limit, apart) // (ranks * batch), 1) * ranks * batch
        starts = [i * last // max(count - 1, 1) for i in range(count)][rank::ranks]
        for first in range(0, len(starts), batch):
            yield self._windows(self.held_out, starts[first : first + batch])

    def _windows(self, text: Tensor, starts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, int64 [len(starts), sequence], of the windows that begin at `starts`."""
        windows = text[torch.tensor(starts)[:, None] + torch.arange(self.sequence + 1)].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


# Each function yields the bytes of one file after another, of a file at most one byte more than the limit.


def _standard_library(limit: int) -> Iterator[bytes]:
    """Yield the standard library's modules, without its tests and unreadable files."""
    for path in _walk(Path(sysconfig.get_path("stdlib")), skip=NOT_LIBRARY):
        if path.suffix == ".py":
            with suppress(OSError):
                yield _read(path, limit)


def _files(paths: Sequence[Path], limit: int) -> Iterator[bytes]:
    """Yield the text of `paths`, each file once, without binary ones."""
    seen: set[Path] = set()
    for path in paths:
        some = False
        try:
            for file in _walk(path) if path.is_dir() or not path.exists() else [path]:
                content = _read(file, limit)
                if content and b"\0" not in content[:BINARY_PROBE]:
                    some = True
                    if (place := file.resolve()) not in seen:
                        seen.add(place)
                        yield content
        except OSError as error:
            raise ValueError(f"--text {error.filename}: {error.strerror}; {ALLOWED}") from None
        if not some:
            raise ValueError(f"--text {path} has only hidden, empty or binary files, or none; {ALLOWED}")


def _read(path: Path, limit: int) -> bytes:
    """Return the first `limit` + 1 bytes, since a file may have any size. Sockets and pipes count as empty."""
    if path.exists() and not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.read(limit + 1)


def _walk(folder: Path, skip: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Yield the files below `folder` in sorted order, without hidden ones and without folders named in `skip`."""

    def refuse(error: OSError) -> None:
        raise error

    for parent, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if name not in skip and not name.startswith("."))
        yield from (Path(parent, name) for name in sorted(files) if not name.startswith("."))
