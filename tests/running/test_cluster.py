"""Two agents of torchrun, each in a network namespace, as on two machines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from overlap1f1b.running.wire import Wire
from tests.running.fork import ROOT
from tests.running.run import SIZES, Run

LAYOUT = ("--pp", "2", "--batch", "2", "--microbatches", "2", "--eval-every", "2")
TRAIN = ("-m", "overlap1f1b", "train", *SIZES, *LAYOUT)
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


def ends(wire: Wire, number: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while processes(wire, number):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_two_agents_train_the_same_losses_as_one_machine(wire: Wire, tmp_path: Path, ranks: int) -> None:
    args = ("--ep", str(ranks), "--steps", "4", "--json")
    with agents(wire, tmp_path, ranks, *args, str(tmp_path / "two")) as started:
        assert [agent.process.wait(120) for agent in started] == [0, 0], [agent.text for agent in started]
    Run("train", *LAYOUT, *args, str(tmp_path / "one")).succeeds()
    results: list[dict[str, Any]] = [json.loads((tmp_path / name).read_text()) for name in ("two", "one")]
    two, one = results
    assert two["environment"]["ranks"] == one["environment"]["ranks"] == 2 * ranks
    assert len(set(two["losses"])) == 4  # two measure nodes, two play a plan
    for key in ("losses", "grad_norm", "held_out"):
        assert two[key] == one[key]


REASONS = {
    0: "The connection to the C10d store has failed",  # said by the other agent, which ends its ranks
    1: "lost another rank: ",
}


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "ranks"), [(0, 1), (1, 2)])
def test_an_agent_is_killed(wire: Wire, tmp_path: Path, victim: int, ranks: int) -> None:
    """So are its ranks; those of the other end within the limit, and say why."""
    args = ("--ep", str(ranks), "--steps", "100000", "--timeout", str(TIMEOUT))
    with agents(wire, tmp_path, ranks, *args) as pair:
        deadline = time.monotonic() + 120
        while "\nstep 2" not in pair[0].text:
            assert time.monotonic() < deadline, [agent.text for agent in pair]
            assert [agent.process.poll() for agent in pair] == [None, None], [agent.text for agent in pair]
            time.sleep(0.1)
        assert [len(processes(wire, number)) > ranks for number in range(2)] == [True, True]
        os.kill(pair[victim].process.pid, signal.SIGKILL)
        other = 1 - victim
        assert ends(wire, victim, 10)
        assert ends(wire, other, TIMEOUT + 10), pair[other].text
        assert pair[other].process.wait(10) not in (0, None)
        assert REASONS[victim] in pair[other].text
