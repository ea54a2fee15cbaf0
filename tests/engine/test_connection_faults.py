"""A rank that dies or fails takes the others with it, within the limit, and each says why."""

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b.schedule import build_schedule
from overlap1f1b.transport.failures import LostRankError
from tests import models
from tests.engines import make
from tests.ranks import RankError, over, run
from tests.tiers import wide

LIMIT = 6.0
M = 6


class Saboteur(nn.Module):
    """A block that does something bad in the forward, or the backward, of one microbatch."""

    def __init__(self, inner: nn.Module, what: str, microbatch: int, when: str, folder: str) -> None:
        super().__init__()
        self.inner, self.what, self.microbatch, self.when, self.folder = inner, what, microbatch, when, folder
        self.forwards = self.backwards = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if self.when == "forward" and self.forwards == self.microbatch:
            x = self._strike(x)
        if self.when == "backward":
            x.register_hook(self._backward)
        self.forwards += 1
        return x

    def _backward(self, grad: Tensor) -> None:
        if self.backwards == self.microbatch:
            self._strike(grad)
        self.backwards += 1

    def _strike(self, x: Tensor) -> Tensor:
        if self.what == "kill":
            die(self.folder)
        Path(self.folder, "struck").write_text(str(time.time()))
        if self.what == "raise":
            raise ArithmeticError("the stage broke")
        if self.what == "detach":
            return x.detach()
        assert self.what == "shape"
        return x[:, :5]


def die(folder: str) -> None:
    Path(folder, "struck").write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


def _step(rank: int, size: int, folder: str, culprit: int, what: str, microbatch: int, when: str) -> None:
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("pp", "ep"))
    blocks: list[nn.Module] = list(models.build(mesh.get_group("ep"), layers=4))
    if rank == culprit and when != "reduce":
        place = 1 if rank < size // 2 else 5
        blocks[place] = Saboteur(blocks[place], what, microbatch, when, folder)
    program = build_schedule("combined_1f1b", ranks=2, microbatches=M)
    engine = make(blocks, program, mesh=mesh, overlap=3, timeout=LIMIT)
    if rank == culprit and when == "reduce":
        (reduction,) = engine.connection.links.reductions
        reduction.launch = lambda node: die(folder)  # type: ignore[method-assign,return-value]
    inputs, target = models.batch(M, seed=rank)
    try:
        engine.step(inputs, target=target)
    except Exception as error:
        note = " ".join(getattr(error, "__notes__", ()))
        Path(folder, f"rank{rank}").write_text(f"{time.time():.1f} {type(error).__name__}: {error} [{note}]")
        with pytest.raises(RuntimeError, match="this engine failed before"):
            engine.step(inputs, target=target)
    else:
        Path(folder, f"rank{rank}").write_text("0 no error")


def _messages(tmp_path: Path, *args: Any) -> dict[int, str]:
    with contextlib.suppress(RankError):  # the culprit was killed
        run(_step, 4, str(tmp_path), *args, timeout=60, grace=3 * LIMIT)
    return {r: (tmp_path / f"rank{r}").read_text() for r in range(4) if (tmp_path / f"rank{r}").exists()}


def struck(folder: Path) -> float:
    return float((folder / "struck").read_text())


@over(2)
def test_a_rank_that_never_steps_is_named(rank: int, size: int, tmp_path: Path) -> None:
    """Rank 1 goes to its checkpoint, its evaluation or its bed, until rank 0, which steps again, has given up."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    program = build_schedule("combined_1f1b", ranks=1, microbatches=2)
    engine = make(models.build(mesh.get_group("ep"), layers=1), program, mesh=mesh, overlap=3, timeout=3.0)
    (inputs, target), told = models.batch(2, seed=rank), tmp_path / "told"
    engine.step(inputs, target=target)
    if rank:
        while not told.exists():
            time.sleep(0.05)
        return
    said = "^no word, within 2 s, from rank ep 1: killed, stopped, ended or busy, or not there yet"
    with pytest.raises(LostRankError, match=said):
        engine.step(inputs, target=target)
    told.touch()


@over(4)
def test_a_rank_that_fails_while_nodes_are_measured_ends_the_others_at_once(
    rank: int, size: int, tmp_path: Path
) -> None:
    """Rank 1 fails while nodes are measured: the other two ranks with data of their own wait in a sum for it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    blocks: list[nn.Module] = list(models.build(mesh.get_group("ep"), layers=4))
    if rank == 1:
        blocks[3] = Saboteur(blocks[3], "raise", 1, "backward", str(tmp_path))
    engine = make(blocks, build_schedule("combined_1f1b", microbatches=2), mesh=mesh, timeout=30)
    begun = time.monotonic()
    with pytest.raises((ArithmeticError, RuntimeError)):
        engine.step(*models.batch(2, seed=rank))
    assert time.monotonic() - begun < 15


PHASES = {"warm-up": (0, "forward"), "steady": (3, "forward"), "cool-down": (M - 1, "backward"), "sum": (0, "reduce")}


@pytest.mark.parametrize(
    ("phase", "culprit"),
    [("warm-up", 0), *wide(("steady", 3), ("cool-down", 0), ("cool-down", 3), ("sum", 0), ("sum", 3))],
)
def test_a_killed_rank_ends_all_others(tmp_path: Path, phase: str, culprit: int) -> None:
    """One on the first stage and one on the last; phases that do not depend on it take turns."""
    messages = _messages(tmp_path, culprit, "kill", *PHASES[phase])
    assert culprit not in messages
    assert len(messages) == 3, messages
    for rank, message in messages.items():
        seconds, text = message.split(" ", 1)
        if text == "no error":  # it needed the dead rank no more: only the last stage may be done that early
            assert (rank // 2, culprit // 2) == (1, 0), messages
            assert phase in ("cool-down", "sum"), messages
            continue
        assert float(seconds) - struck(tmp_path) < 2 * LIMIT, message
        assert text.startswith("LostRankError"), message
        assert " m" in text, message  # the node, with its microbatch
        assert f"from rank pp {culprit // 2}, ep {culprit % 2}: killed" in text, message
        assert "lane" in text or "did not meet" in text or "rank pp" in text, message
        assert f"pp {rank // 2}" in text, message


@pytest.mark.parametrize(
    ("what", "cause", "culprit"),
    [
        ("raise", "ArithmeticError: the stage broke", 0),
        *wide(
            ("raise", "ArithmeticError: the stage broke", 3),
            ("shape", "to match target batch_size", 0),
            ("detach", "require no gradient although its input does", 3),
        ),
    ],
)
def test_a_rank_that_fails_says_why_on_every_rank(tmp_path: Path, what: str, cause: str, culprit: int) -> None:
    messages = _messages(tmp_path, culprit, what, 2, "forward")
    assert len(messages) == 4, messages
    for message in messages.values():
        assert float(message.split(" ", 1)[0]) - struck(tmp_path) < 2 * LIMIT, message
        assert "failed at" in message, message
        assert cause in message, message
