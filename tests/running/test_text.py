"""The corpus: what is read, how it is split, and windows that are a pure function of (seed, step, rank)."""

import math
import os
from collections import Counter
from pathlib import Path

import pytest
import torch

from overlap1f1b.running.text import Corpus
from tests.tiers import wide

S = 8  # the sequence of the small corpora


def numbered(folder: Path, count: int, size: int = 40) -> Path:
    """`count` files; every byte of file i is i + 1, so that a window shows where it was cut from."""
    folder.mkdir(exist_ok=True)
    for i in range(count):
        (folder / f"{i:03d}.txt").write_bytes(bytes([i + 1]) * size)
    return folder


def of(folder: Path, text: bytes, **options: float) -> Corpus:
    """The corpus of one file."""
    (folder / "a.txt").write_bytes(text)
    return Corpus.load([folder], sequence=S, **options)  # type: ignore[arg-type]


def values(tensor: torch.Tensor) -> set[int]:
    return set(tensor.flatten().tolist())


# What is read.


def test_the_standard_library_is_the_default() -> None:
    corpus = Corpus.load(sequence=256)
    assert 5e6 < len(corpus.train) <= 32 * 2**20
    assert 0.025 < len(corpus.held_out) / (len(corpus.train) + len(corpus.held_out)) < 0.1
    assert str(corpus).startswith("standard library of Python 3.")
    assert 2.5 < corpus.unigram_entropy < 4
    assert b"import" in bytes(corpus.train[:2_000_000].tolist())
    assert Corpus.load(sequence=256).digest == corpus.digest


def test_tests_and_installed_packages_are_no_part_of_the_standard_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, letter in {
        "a.py": "a",
        "test/b.py": "b",
        "site-packages/c.py": "c",
        "sub/d.py": "d",
        "e.txt": "e",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(letter * 100)
    (tmp_path / "gone.py").symlink_to("nowhere")  # cannot be read, which the default corpus does not mind
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    corpus = Corpus.load(sequence=S)
    assert values(corpus.train) | values(corpus.held_out) == {ord("a"), ord("d")}


def test_folders_are_read_in_order_without_hidden_and_binary_files(tmp_path: Path) -> None:
    for name, content in {
        "b/z.txt": b"1" * 50,
        "b/a.md": b"2" * 50,
        "a.txt": b"3" * 50,
        ".hidden.txt": b"h" * 50,
        ".git/config": b"g" * 50,
        "image.png": b"i" * 20 + b"\0" + b"i" * 50,
        "late-zero.txt": b"4" * 8192 + b"\0",
        "empty.txt": b"",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    os.mkfifo(tmp_path / "pipe")
    corpus = Corpus.load([tmp_path], sequence=S)
    whole = bytes(corpus.train.tolist() + corpus.held_out.tolist())
    assert whole == b"3" * 50 + b"4" * 8192 + b"\0" + b"2" * 50 + b"1" * 50


def test_a_file_reached_twice_is_read_once(tmp_path: Path) -> None:
    folder = numbered(tmp_path / "texts", 3)
    once = Corpus.load([folder], sequence=S)
    assert Corpus.load([folder, folder / "001.txt", folder], sequence=S).digest == once.digest


def test_the_limit_cuts_the_last_file(tmp_path: Path) -> None:
    corpus = Corpus.load([numbered(tmp_path, 3)], sequence=S, limit_bytes=100)
    assert len(corpus.train) + len(corpus.held_out) == 100
    assert ", the first 0.0001 MB: " in str(corpus)


# How it is split.


@pytest.mark.parametrize("part", [0.01, *wide(0.05, 0.6, 0.99)])
def test_the_parts_are_the_whole_text_and_each_holds_a_window(tmp_path: Path, part: float) -> None:
    corpus = Corpus.load([numbered(tmp_path, 7)], sequence=S, held_out=part)
    assert min(len(corpus.train), len(corpus.held_out)) >= S + 1
    assert corpus.train.tolist() + corpus.held_out.tolist() == [i + 1 for i in range(7) for _ in range(40)]


def test_the_digest_tells_texts_and_splits_apart(tmp_path: Path) -> None:
    """A checkpoint is of the text with its digest, so two that differ in a byte, or in where they are cut, need two."""
    content = bytes(range(1, 201))

    def digest(text: bytes, held_out: float = 0.05) -> str:
        return of(tmp_path, text, held_out=held_out).digest

    assert digest(content) == digest(content)
    assert len({digest(content), digest(content[:-1] + b"!"), digest(content[::-1]), digest(content, 0.25)}) == 4


# Windows.


def test_targets_are_the_next_bytes(tmp_path: Path) -> None:
    corpus = of(tmp_path, bytes(range(1, 201)), held_out=0.25)
    for inputs, targets in [corpus.batch(0, 0, batch=50, seed=0), *corpus.held_out_batches(0, 1, batch=2, limit=99)]:
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.shape == targets.shape
        assert inputs.shape[1] == S
        assert torch.equal(inputs + 1, targets)
        assert inputs.is_contiguous()
        assert targets.is_contiguous()


def test_a_batch_is_a_function_of_seed_step_and_rank(tmp_path: Path) -> None:
    corpus = of(tmp_path, bytes(i % 251 + 1 for i in range(100_000)))

    def batch(step: int, rank: int, seed: int) -> tuple[int, ...]:
        return tuple(corpus.batch(step, rank, batch=6, seed=seed)[0].flatten().tolist())

    first = batch(5, 1, 0)
    torch.rand(3)
    batch(6, 1, 0)
    assert batch(5, 1, 0) == first
    different = {batch(step, rank, seed) for step in range(3) for rank in range(3) for seed in (-1, 0, 1)}
    assert len(different) == 27
    # Fixed for good: a checkpoint written under one release of torch resumes under another with the same data.
    assert corpus.batch(5, 1, batch=6, seed=0)[0][:, 0].tolist() == [105, 233, 186, 242, 229, 162]


def test_windows_are_drawn_from_the_whole_training_part_alone(tmp_path: Path) -> None:
    corpus = of(tmp_path, bytes(range(1, 101)), held_out=0.3)
    inputs, targets = corpus.batch(0, 0, batch=2000, seed=0)
    assert values(inputs[:, 0]) == set(range(1, 71 - S))
    assert values(inputs) | values(targets) == set(range(1, 71))


def test_held_out_windows_are_the_same_for_any_number_of_ranks(tmp_path: Path) -> None:
    corpus = of(tmp_path, bytes(i * 7 % 251 + 1 for i in range(4000)), held_out=0.25)

    def windows(ranks: int, limit: int) -> list[Counter[tuple[int, ...]]]:
        return [
            Counter(
                tuple(row) for inputs, _ in corpus.held_out_batches(rank, ranks, 2, limit) for row in inputs.tolist()
            )
            for rank in range(ranks)
        ]

    (alone,) = windows(1, 24)
    assert alone.total() == 24
    for ranks in (2, 3, 4):
        shares = windows(ranks, 24)
        assert sum(shares, Counter()) == alone
        assert {share.total() for share in shares} == {24 // ranks}
    assert [share.total() for share in windows(2, 999)] == [62, 62]  # (1000 - 1) // 8 windows, a multiple of 4
    assert [share.total() for share in windows(2, 23)] == [10, 10]


def test_held_out_windows_reach_both_ends_and_do_not_overlap(tmp_path: Path) -> None:
    corpus = of(tmp_path, bytes(range(1, 201)), held_out=0.5)
    (batch,) = corpus.held_out_batches(0, 1, batch=4, limit=4)
    assert batch[0][:, 0].tolist() == [101, 131, 161, 192]
    predicted = [target for _, targets in corpus.held_out_batches(0, 1, 3, 99) for target in targets.flatten().tolist()]
    assert len(predicted) == len(set(predicted)) == 12 * S


def test_a_short_held_out_part_still_gives_every_rank_a_batch(tmp_path: Path) -> None:
    corpus = of(tmp_path, bytes(range(1, 101)))
    assert len(corpus.held_out) == S + 1
    for rank in range(2):
        ((inputs, _),) = corpus.held_out_batches(rank, 2, 3, 99)
        assert inputs.tolist() == [list(range(92, 100))] * 3


# The yardstick.


def test_the_unigram_entropy_is_the_cost_of_the_held_out_bytes_under_the_training_frequencies(tmp_path: Path) -> None:
    corpus = of(tmp_path, b"a" * 60 + b"b" * 20 + b"a" * 10 + b"c" * 10, held_out=0.2)
    expected = -(math.log(61 / (80 + 256)) + math.log(1 / (80 + 256))) / 2
    assert corpus.unigram_entropy == pytest.approx(expected)


# What cannot be used.


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nowhere", ": No such file or directory"),
        ("pipe", " has only hidden, empty or binary files, or none"),
        ("gone", "/link: No such file or directory"),
        *((name, " has only hidden, empty or binary files, or none") for name in ("empty", "binary", "bare")),
    ],
)
def test_paths_that_cannot_be_used_are_named(tmp_path: Path, name: str, why: str) -> None:
    folder = numbered(tmp_path / "texts", 3)
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "binary").write_bytes(b"ab\0c" * 50)
    for other in ("bare", "gone"):
        (tmp_path / other).mkdir()
    (tmp_path / "bare" / ".hidden").write_bytes(b"h" * 100)
    (tmp_path / "gone" / "link").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=f"^--text {tmp_path}/{name}{why}; allowed: text files that can be read, or"):
        Corpus.load([folder, tmp_path / name], sequence=S)


def test_a_text_too_short_says_what_is_needed(tmp_path: Path) -> None:
    expected = "allowed: 9 or more to train on, and as many held out, by a longer --text or a shorter --sequence"
    with pytest.raises(ValueError, match=expected):
        of(tmp_path, b"x" * 17)
    assert len(of(tmp_path, b"x" * 18).held_out) == 9
