"""Two agents of torchrun, each in a network namespace, as on two machines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from overlap1f1b.running.wire import Wire
from tests.running.fork import ROOT
from tests.running.run import SIZES, Run, until

TRAIN = ("-m", "overlap1f1b", "train", *SIZES)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node")
TIMEOUT = 20


@pytest.fixture
def wire() -> Iterator[Wire]:
    try:
        made = Wire(2)
    except ValueError as error:
        pytest.skip(str(error))
    with made:
        yield made


class Agent:
    """torchrun on one of two machines, with this number of ranks."""

    def __init__(self, number: int, wire: Wire, folder: Path, stack: ExitStack, ranks: int, *args: str) -> None:
        self.output = folder / f"output {number}"
        rendezvous = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "one")
        rendezvous += ("--local-addr", wire.address(number))
        # Both namespaces have the machine's host name, by which torchrun would find out who holds the store.
        end = ("--rdzv-endpoint", f"{wire.address(0)}:29500", "--rdzv-conf", f"is_host={int(number == 0)}")
        self.process = subprocess.Popen(
            [*wire.prefix(number), *TORCHRUN, str(ranks), *rendezvous, *end, *TRAIN, *args],
            cwd=ROOT,
            env=dict(os.environ, PYTHONUNBUFFERED="1") | wire.environment(number),
            stdin=subprocess.DEVNULL,
            stdout=stack.enter_context(self.output.open("w")),
            stderr=subprocess.STDOUT,
        )

    @property
    def text(self) -> str:
        return self.output.read_text()


@contextmanager
def agents(wire: Wire, folder: Path, ranks: int, *args: str) -> Iterator[list[Agent]]:
    with ExitStack() as stack:
        yield [Agent(number, wire, folder, stack, ranks, *args) for number in range(2)]


def processes(wire: Wire, number: int) -> list[str]:
    """Of one machine, agent and ranks."""
    command = ["ip", "netns", "pids", wire.prefix(number)[-1]]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def history(checkpoint: Path, *args: object) -> dict[str, Any]:
    """What a checkpoint knows of the steps before it, by a run that has nothing left to train."""
    result = checkpoint / "json"
    Run("train", *args, "--ranks", 1, "--steps", 4, "--checkpoint", checkpoint, "--json", result).succeeds()
    return json.loads(result.read_text())


LOST = "lost another rank: "
REASONS = {
    # The other agent has lost its store, and ends its ranks, unless they have ended by themselves before.
    0: ("The connection to the C10d store has failed", LOST),
    1: (LOST,),
}


@pytest.mark.wide
@pytest.mark.parametrize(("victim", "ranks"), [(0, 1), (1, 2)])
def test_two_agents_train_the_same_losses_as_one_machine_until_one_is_killed(
    wire: Wire, text: Path, tmp_path: Path, victim: int, ranks: int
) -> None:
    """So are the killed agent's ranks; those of the other end within the limit, and say why."""
    sizes = ("--text", str(text), "--batch", "2", "--microbatches", "2", "--eval-every", "1")
    args = (*sizes, "--pp", "2", "--ep", str(ranks), "--steps", "2000", "--checkpoint-every", "4")
    with agents(wire, tmp_path, ranks, *args, "--timeout", str(TIMEOUT), "--checkpoint", str(tmp_path / "two")) as pair:
        checkpoint, others = tmp_path / "two" / "step-00000004", lambda: [agent.process.poll() for agent in pair]
        until(lambda: checkpoint.exists() or any(others()), 120, lambda: [agent.text for agent in pair])
        assert others() == [None, None], [agent.text for agent in pair]
        assert [len(processes(wire, number)) > ranks for number in range(2)] == [True, True]
        os.kill(pair[victim].process.pid, signal.SIGKILL)
        other = 1 - victim
        until(lambda: not processes(wire, victim), 10)
        until(lambda: not processes(wire, other), TIMEOUT + 10, lambda: pair[other].text)
        assert pair[other].process.wait(10) not in (0, None)
        assert any(reason in pair[other].text for reason in REASONS[victim])
        assert f"on {2 * ranks} ranks (pp 2 × " in pair[0].text

    alone = Run("train", *args, "--checkpoint", tmp_path / "one")
    alone.until((tmp_path / "one" / "step-00000004").exists)
    alone.process.kill()
    two, one = (history(tmp_path / name, *sizes) for name in ("two", "one"))
    assert len(set(two["losses"][:4])) == 4  # two measure nodes, two play a plan
    for key in ("losses", "grad_norm"):
        assert two[key][:4] == one[key][:4]
    assert two["held_out"]["losses"][:3] == one["held_out"]["losses"][:3]
