"""Two agents of torchrun, each in a network namespace, as on two machines."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from overlap1f1b.running.wire import Wire
from tests.running.fork import ROOT
from tests.running.run import SIZES, Run, until

TRAIN = ("-m", "overlap1f1b", "train", *SIZES)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node")
TIMEOUT = 20
KILLS = int(os.environ.get("KILLS", "3"))
OWN = str(ROOT / "examples" / "train_own.py")
EVERY, MOST = 2, 4
"""Steps between two checkpoints, and checkpoints from one kill to the next at most."""
SECONDS = 10.0
"""Longest time behind a kill in which the next one may find ranks that start."""


@pytest.fixture
def wire() -> Iterator[Wire]:
    with ExitStack() as stack:
        try:
            made = stack.enter_context(Wire(2))
        except ValueError as error:  # not root, or a root that may not make namespaces
            pytest.skip(str(error))
        yield made


class Agent:
    """torchrun on one of two machines, with this number of ranks."""

    def __init__(self, number: int, wire: Wire, folder: Path, stack: ExitStack, ranks: int, *words: str) -> None:
        self.output = folder / f"output {number}"
        rendezvous = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "one")
        rendezvous += ("--local-addr", wire.address(number))
        # Both namespaces have the machine's host name, by which torchrun would find out who holds the store.
        end = ("--rdzv-endpoint", f"{wire.address(0)}:29500", "--rdzv-conf", f"is_host={int(number == 0)}")
        self.process = subprocess.Popen(
            [*wire.prefix(number), *TORCHRUN, str(ranks), *rendezvous, *end, *words],
            cwd=ROOT,
            env=dict(os.environ, PYTHONUNBUFFERED="1") | wire.environment(number),
            stdin=subprocess.DEVNULL,
            stdout=stack.enter_context(self.output.open("w")),
            stderr=subprocess.STDOUT,
        )

    @property
    def text(self) -> str:
        return self.output.read_text()

    def workers(self) -> list[psutil.Process]:
        """Its ranks that run."""
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if child.status() != psutil.STATUS_ZOMBIE]


@contextmanager
def agents(wire: Wire, folder: Path, ranks: int, *words: str) -> Iterator[list[Agent]]:
    """Words are further options of torchrun, and the program."""
    with ExitStack() as stack:
        yield [Agent(number, wire, folder, stack, ranks, *words) for number in range(2)]


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
    here = ("--timeout", str(TIMEOUT), "--checkpoint", str(tmp_path / "two"))
    with agents(wire, tmp_path, ranks, *TRAIN, *args, *here) as pair:
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


def at_the_end(folder: Path, steps: int) -> dict[str, Any]:
    """The checkpoint of the last step, without random numbers: the program seeds torch's alone."""
    dcp_to_torch_save(folder / f"step-{steps:08}", folder / "whole")
    found = torch.load(folder / "whole", weights_only=False)
    return {name: value for name, value in found.items() if not name.startswith("state.random")}


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return one.getvalue() == other.getvalue() if isinstance(one, io.BytesIO) else one == other


@pytest.mark.wide
@pytest.mark.timeout(120 + 60 * KILLS)
def test_ranks_killed_at_random_moments_start_anew_to_the_same_bits(wire: Wire, tmp_path: Path) -> None:
    """Two agents, each with a rank, of which one is killed. KILLS=20 kills more often."""
    steps, source = EVERY * MOST * (KILLS + 1), random.Random(KILLS)
    two, one = tmp_path / "two", tmp_path / "one"
    program = (OWN, "--steps", str(steps), "--every", str(EVERY), "--save")
    restarts = ("--max-restarts", str(2 * KILLS), "--monitor-interval", "0.1")
    reached = []
    with agents(wire, tmp_path, 1, *restarts, *program, str(two)) as pair:
        for number in range(KILLS):
            agent, more, seconds = source.choice(pair), source.randint(1, MOST), source.uniform(0.0, SECONDS)
            begun, newest = time.monotonic(), steps_in(two)
            # Each third at any time, as while ranks meet and start; the others some checkpoints on, as in a save.
            until_then = begun + (120.0 if number % 3 else seconds)
            while time.monotonic() < until_then and steps_in(two) < newest + more * EVERY:
                assert [one.process.poll() for one in pair] == [None, None], [one.text for one in pair]
                time.sleep(0.01)
            time.sleep(source.uniform(0.0, 0.3))
            until(agent.workers, 60, lambda: [one.text for one in pair])  # they may meet just now
            agent.workers()[0].kill()
            reached.append(steps_in(two))
        assert [agent.process.wait(60 * KILLS) for agent in pair] == [0, 0], [agent.text for agent in pair]
    assert len(set(reached)) > 1
    assert reached == sorted(reached)
    alone = [*TORCHRUN, "2", OWN, *program[1:], str(one)]
    subprocess.run(alone, cwd=ROOT, env=dict(os.environ, GLOO_SOCKET_IFNAME="lo"), check=True, timeout=60 * KILLS)
    found, expected = at_the_end(two, steps), at_the_end(one, steps)
    assert found.keys() == expected.keys()
    assert [name for name, value in found.items() if not equal(value, expected[name])] == []


def steps_in(folder: Path) -> int:
    """The step of the newest checkpoint."""
    return max((int(path.name.removeprefix("step-")) for path in folder.glob("step-*")), default=0)
