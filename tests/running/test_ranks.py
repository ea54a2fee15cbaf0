"""Devices of ranks, and their errors in one line."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from overlap1f1b.running.ranks import NotJoinedError, joined, lost, ranks_with_gpu
from overlap1f1b.transport.failures import LostRankError
from tests.running.fork import torchrun_environs

SOURCE = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] "


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            f"{SOURCE}Timed out waiting 3000ms for recv operation to complete (limit 3 s)",
            "Timed out waiting 3000ms for recv operation to complete",
        ),
        ("Application timeout caused pair closure (limit 3 s)", "Application timeout caused pair closure"),
        ("Operation timed out! (limit 3 s)", "Operation timed out"),
        ("no answer (limit 3 s)", "no answer (limit 3 s)"),
        ("rank ep 1 failed at experts.f[0] m1: KeyError: 'x'", "rank ep 1 failed at experts.f[0] m1: KeyError: 'x'"),
    ],
)
def test_how_another_rank_was_lost(text: str, line: str) -> None:
    lane = "dispatch.f[0] m1 on the lane dispatch failed: RuntimeError: "
    assert lost(LostRankError(f"{lane}{text}")) == f"{lane}{line}"
    closed = "Connection closed by peer [127.0.0.1]:23437. This is typically caused by a remote worker."
    assert lost(LostRankError(f"{SOURCE}{closed}")) == "Connection closed by peer"


def test_an_error_of_this_rank_keeps_its_traceback() -> None:
    own = ValueError("shape '[3, 8]' is invalid for input of size 16")
    assert lost(own) is None
    error = LostRankError(f"dispatch.f[0] m1 on the lane dispatch failed: ValueError: {own}")
    error.__cause__ = own
    assert lost(error) is None


@pytest.mark.parametrize(
    ("gpus", "own"), [(["a", "b", "c"], 3), (["a", "b", "a"], 2), (["a", None, "c"], 2), ([None] * 3, 0)]
)
def test_ranks_compute_on_gpus_if_each_has_its_own(gpus: list[str | None], own: int) -> None:
    """Whatever numbers they have: a job may show every rank its GPU as number 0."""
    store = HashStore()
    with ThreadPoolExecutor(len(gpus)) as ranks:
        assert list(ranks.map(lambda gpu: ranks_with_gpu(store, len(gpus), gpu), gpus)) == [own] * len(gpus)


def test_a_rank_whose_peers_never_come(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in torchrun_environs(2)[0].items():
        if name != "TORCHELASTIC_RUN_ID":  # this process is no child of an agent
            monkeypatch.setenv(name, value)
    expected = pytest.raises(NotJoinedError, match=r"^rank 0 waited for all of 2 ranks: .* \(--timeout 0.5\)$")
    with expected, joined((1, 1, 2), 0.5):
        pass
