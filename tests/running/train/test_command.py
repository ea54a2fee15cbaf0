"""`overlap1f1b train` as a user runs it: results, resumption after kills, bad input."""

import json
import os
import re
import shlex
import signal
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest

from overlap1f1b.running.launch import NOT_JOINED
from overlap1f1b.running.options import TrainOptions
from overlap1f1b.running.workload import model_config
from overlap1f1b.schedule import SCHEDULES
from tests.cli.inside import Verb
from tests.running.fork import torchrun_environs
from tests.running.run import COMMAND, Run, refused
from tests.running.train.test_command_display import scalars
from tests.tiers import wide

STEPS = ["--layers", "1", "--steps", "20", "--eval-every", "10", "--checkpoint-every", "4", "--dropout", "0.1"]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, text: Path) -> tuple[Path, dict[str, Any]]:
    """The checkpoints and the results of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("unbroken")
    (folder / "run").mkdir()
    (folder / "run" / "notes").touch()  # no checkpoint
    outputs = ("--checkpoint", folder / "run", "--json", folder / "json", "--tensorboard", folder / "board")
    out = Run("train", "--text", text, *STEPS, *outputs).succeeds()
    assert re.search(r"\d tokens/s  hidden \d+%  exposed \d+ ms\n", out)
    assert f"\n{folder}/run has no checkpoint: training begins at step 0\n" in out
    return folder / "run", json.loads((folder / "json").read_text())


def test_results(unbroken: tuple[Path, dict[str, Any]]) -> None:
    folder, result = unbroken
    assert {"environment", "workload", "steps", "loss", "tokens_per_s", "hidden_fraction", "checkpoint"} <= set(result)
    assert result["steps"] == len(result["losses"]) == len(result["grad_norm"]) == 20
    assert result["loss"] == {"first": result["losses"][0], "last": result["losses"][-1]}
    assert result["loss"]["last"] < result["loss"]["first"] - 1
    assert [step for step, _ in result["held_out"]["losses"]] == [10, 20]
    assert result["held_out"]["losses"][-1][1] == result["held_out"]["loss"]
    assert result["held_out"]["loss"] < result["held_out"]["losses"][0][1] < result["loss"]["first"]
    assert 0 < result["hidden_fraction"] <= 1
    assert 0 < result["exposed_ms"] < result["step_ms"]
    assert result["tokens_per_s"] == pytest.approx(2 * 8 * 32 / (result["step_ms"] / 1e3))  # ranks, batch, sequence
    assert result["compare"] is None
    assert result["checkpoint"] == str(folder / "step-00000020")


def test_tensorboard_shows_the_same(unbroken: tuple[Path, dict[str, Any]]) -> None:
    folder, result = unbroken
    (events,) = (folder.parent / "board").iterdir()  # of one rank
    shown = scalars(events)
    assert [value for _, value in shown["loss"]] == pytest.approx(result["losses"], rel=1e-6)
    assert [value for _, value in shown["grad_norm"]] == pytest.approx(result["grad_norm"], rel=1e-6)
    assert shown["held_out_loss"] == [(step, pytest.approx(loss)) for step, loss in result["held_out"]["losses"]]
    settling = result["settling_steps"]  # they measure nodes or try plans
    assert settling in {2, 8, 11}
    assert " (measured step: " in result["order"] or settling == 2
    planned = {name: [value for step, value in shown[name] if step > settling] for name in shown}
    assert 1 / median(1 / value for value in planned["tokens_per_s"]) == pytest.approx(result["tokens_per_s"], rel=1e-3)
    assert median(planned["hidden_fraction"]) == pytest.approx(result["hidden_fraction"], rel=1e-3)
    assert median(planned["exposed_ms"]) == pytest.approx(result["exposed_ms"], rel=1e-3)


def under_torchrun(*args: object) -> str:
    """What two ranks write by what torchrun puts into the environment; ../test_launch_cluster.py starts it."""
    runs = [Run("train", *args, **environ) for environ in torchrun_environs(2)]
    found = [run.wait() for run in runs]
    assert [status for status, _, _ in found] == [0, 0], found
    return found[0][1]


def test_killed_and_resumed_as_if_never_killed(
    unbroken: tuple[Path, dict[str, Any]], text: Path, tmp_path: Path
) -> None:
    """First a rank is killed, then the parent; each time what was written last is whole, and training goes on there.

    The last time under torchrun.
    """
    folder = tmp_path / "run"
    args = ("--text", text, *STEPS, "--checkpoint", folder, "--recompute", "block")

    def steps() -> list[int]:
        return sorted(int(path.name[5:]) for path in folder.glob("step-*"))

    one = Run("train", *args)
    one.until(lambda: 4 in steps())
    ranks, killed = one.ranks(), time.monotonic()
    ranks[1].kill()
    status, _, err = one.wait(30)
    assert status == 128 + signal.SIGKILL
    *_, how, resume = err.splitlines()
    assert resume.startswith(f"overlap1f1b: ended; the last checkpoint is {folder}/step-")
    assert how == (
        "overlap1f1b: error: rank 1 was killed by signal 9 (SIGKILL), perhaps since memory was full; "
        "the other ranks were stopped"
    )
    assert "Traceback" not in err
    assert not psutil.wait_procs(ranks, 30 - (time.monotonic() - killed))[1]

    first = steps()[-1]
    two = Run("train", *args)
    two.until(lambda: steps()[-1] > first)
    ranks = two.ranks()
    two.process.kill()
    assert not psutil.wait_procs(ranks, 30)[1]
    two.wait()

    second = steps()[-1]
    assert first < second < 20
    out = under_torchrun(*args, "--json", tmp_path / "json")
    assert f"resumed: {folder}/step-{second:08d} has {second} steps, going on to 20" in out
    result, expected = json.loads((tmp_path / "json").read_text()), unbroken[1]
    assert (result["environment"]["ranks"], result["resumed_from"]) == (2, second)
    for key in ("losses", "grad_norm", "held_out"):
        assert result[key] == expected[key]


def test_complete_on_another_number_of_ranks(unbroken: tuple[Path, dict[str, Any]], text: Path, tmp_path: Path) -> None:
    folder, expected = unbroken
    args = ("--text", text, *STEPS, "--checkpoint", folder, "--ranks", 1, "--json", tmp_path / "json")
    beside = ("--compare", "--schedule", "combined_1f1b")
    assert f"{folder}/step-00000020 has 20 steps, nothing left to train" in Run("train", *args, *beside).succeeds()
    result = json.loads((tmp_path / "json").read_text())
    assert result["held_out"]["loss"] == pytest.approx(expected["held_out"]["loss"], rel=1e-5)
    assert result["losses"] == expected["losses"]
    assert result["tokens_per_s"] is None


def test_compare_and_nothing_but_json_on_standard_output(text: Path) -> None:
    args = ("--layers", 1, "--steps", 6, "--dropout", 0.1)
    status, out, err = Run("train", "--text", text, *args, "--compare", "--json", "-").wait()
    assert status == 0
    result = json.loads(out)
    compare = result["compare"]
    assert compare["losses_equal"]
    assert compare["losses"] == result["losses"]
    assert len(compare["losses"]) == 6
    assert len(set(compare["losses"])) == 6
    assert compare["speedup"] == pytest.approx(compare["step_ms"] / result["step_ms"])
    assert "losses equal at every step" in err
    assert "held-out loss" in err


def test_interrupt_says_how_to_resume(text: Path, tmp_path: Path) -> None:
    """Nothing else is on stderr, in processes that start as a user starts them."""
    saved = ("--layers", 1, "--checkpoint-every", 4, "--checkpoint", tmp_path / "run")
    run = Run("train", "--text", text, "--steps", 100_000, *saved, command=COMMAND)
    run.until(lambda: list(tmp_path.glob("run/step-*")))
    ranks = run.ranks()
    run.process.send_signal(signal.SIGINT)
    status, _, err = run.wait(30)
    last = max(tmp_path.glob("run/step-*"))
    assert status == 128 + signal.SIGINT
    resumed = re.fullmatch(rf"overlap1f1b: ended; the last checkpoint is {last}; resume: overlap1f1b (train .*)\n", err)
    assert resumed is not None, err
    assert shlex.split(resumed[1])[-1] == str(tmp_path / "run")
    assert not psutil.wait_procs(ranks, 5)[1]


@pytest.mark.parametrize("moments", [[(0, 0.0), (1, 0.3)], *wide([(1, 0.02), (0, 0.1)])])
def test_a_rank_that_does_not_answer(text: Path, tmp_path: Path, moments: list[tuple[int, float]]) -> None:
    """The others wait for as long as they are told to, say where, and everything ends.

    In a step, or at any moment while ranks start: before it joins, or where it makes its engine. Most of this is
    waiting, so these trainings run together.
    """
    args = ("--text", text, "--steps", 100_000)
    runs, started = [], []
    for rank, after in moments:
        runs.append(run := Run("train", "--ep", "2", *args, "--timeout", 2))
        # A rank has a session of its own when Popen returns; its stand-in here, a fork, a moment later.
        run.until(lambda run=run: sum(os.getsid(rank.pid) == rank.pid for rank in run.ranks()) == 2)
        started += (ranks := run.ranks())
        time.sleep(after)
        ranks[rank].suspend()
    folder = tmp_path / "run"
    run = Run("train", *args, "--timeout", 3, "--checkpoint-every", 4, "--checkpoint", folder)
    run.until(lambda: list(folder.glob("step-*")))
    started += (ranks := run.ranks())
    ranks[1].suspend()

    status, _, err = run.wait(40)
    assert err.count("\n") == 2, err
    lost, ended = err.splitlines()
    assert status == 1
    assert lost.startswith("overlap1f1b: rank 0 lost another rank: ")
    # by the wait that ends first: of this transfer, of another lane, or of all ranks together
    assert re.search("Timed out waiting 3000ms for |Application timeout|Operation timed out|no answer", lost), lost
    assert ended == (
        "overlap1f1b: error: rank 0 ended with status 1; rank 1 was suspended (SIGSTOP); the other ranks were stopped"
    )
    for run, (rank, _) in zip(runs, moments, strict=True):
        status, _, err = run.wait(40)
        assert status in (1, NOT_JOINED, 128 + signal.SIGSTOP)
        assert "Traceback" not in err
        # A fork has imported torch before it asks for no lines of torch's C++.
        *lost, ended = [line for line in err.splitlines() if not line.startswith("[rank")]
        assert [line.startswith(f"overlap1f1b: rank {1 - rank} lost another rank: ") for line in lost] in ([], [True])
        assert f"rank {rank} was suspended (" in ended, err
    assert not psutil.wait_procs(started, 5)[1]


def test_too_small_a_capacity_is_one_line(text: Path) -> None:
    status, _, err = Run("train", "--text", text, *STEPS[:-4], "--capacity", 1).wait()
    assert status == 2, err
    assert re.fullmatch(
        r"overlap1f1b: error: \d+ choices of block 1 .* found no room under capacity=1: .*; "
        r"allowed: a larger --capacity\n",
        err,
    )


# Bad input: one line on standard error, with the value and what is allowed.


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ("--microbatches 0", "--microbatches 0; allowed: 1 or more"),
        ("--batch 6", "--batch 6 cannot be split into --microbatches 4; allowed: a multiple of 4"),
        ("--schedule zigzag", f"unknown schedule 'zigzag'; allowed: {', '.join(SCHEDULES)}, auto"),
        ("--overlap 0", "--overlap 0; allowed: serial, pairs, or a number of open actions from 1"),
        ("--lr nan", "--lr nan; allowed: more than 0, finite"),
        ("--timeout 1e30", "--timeout 1e+30; allowed: seconds > 0, at most 1e+09"),
        ("--extra-warmup -1", "--extra-warmup -1; allowed: 0 or more"),
        ("--seed 9223372036854775808", "--seed 9223372036854775808; allowed: 0 or more, at most 9223372036854775807"),
        (
            f"--checkpoint {__file__}/run",
            f"--checkpoint {__file__}/run: {__file__} is a file; allowed: a folder, which may be new",
        ),
    ],
)
def test_options_that_no_run_can_have(capsys: pytest.CaptureFixture[str], args: str, error: str) -> None:
    assert Verb("train").refused(capsys, *args.split()) == error


def test_the_model_runs_by_the_kernels_of_the_options() -> None:
    assert model_config(TrainOptions(kernels="torch")).kernels == "torch"


def test_more_ranks_than_a_machine_can_hold() -> None:
    """They are not started."""
    error = refused("train", "--ep", 4096, "--experts", 4096)
    assert error.startswith("--pp 1 --dp 1 --ep 4096 are 4096 ranks on ")
    assert "; allowed: up to " in error


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ("--experts 7", "--experts 7 cannot be divided over --ep 2; allowed: --ep 1, 7"),
        *wide(("--experts 4 --top-k 5", "--top-k 5 with --experts 4; allowed: 1 to 4")),
    ],
)
def test_options_that_no_model_can_have(args: str, error: str, text: Path) -> None:
    assert refused("train", "--text", text, *args.split()) == error


def test_checkpoint_of_another_model_or_text(unbroken: tuple[Path, dict[str, Any]], text: Path, tmp_path: Path) -> None:
    folder, _ = unbroken
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert refused("train", "--text", text, *STEPS, "--checkpoint", folder, "--hidden", 64) == (
        f"checkpoint {folder}/step-00000020 has hidden=32, this run has hidden=64; "
        "use the same settings or another checkpoint folder"
    )
    other = tmp_path / "other.txt"
    other.write_text("another text. " * 100)
    error = refused("train", "--text", other, *STEPS, "--checkpoint", folder, "--ranks", 1)
    assert f"checkpoint {folder}/step-00000020 has text=" in error
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_diverging(text: Path) -> None:
    """In a step that leaves the weights as they were, or after the last one."""
    args = ("--text", text, "--lr", "1e9", "--ranks", 1)
    error = refused("train", *args, "--steps", 9)
    assert "with --lr 1e+09; allowed: finite ones (use a smaller --lr or --clip)" in error
    expected = "held-out loss nan with --lr 1e+09; allowed: a finite one (use a smaller --lr)"
    assert refused("train", *args, "--steps", 1) == expected
