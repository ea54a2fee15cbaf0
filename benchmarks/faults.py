"""Injects faults into real training over pp 2 × ep 2 and looks at how every rank ends.

    python benchmarks/faults.py                    # 107 faults, two at a time: about 7 minutes on two cores
    python benchmarks/faults.py --only 17 18       # two of them, with what their ranks printed
    python benchmarks/faults.py --list

A fault is something that one rank does in one phase of a loop of a user's own: it raises, is killed, or is stopped
(SIGSTOP); or it has another option, seed, size or program than the others. It passes if every other rank ends within
the limit by its own status, says on which rank and where it happened and why, and nothing is aborted or goes on.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import overlap1f1b as o1
from overlap1f1b.moe import GroupedExperts

PP, EP, MICROBATCHES, HIDDEN, VOCAB, STEPS = 2, 2, 4, 16, 31, 4
RANKS = PP * EP
LIMIT_S = 8.0
END_S = 2 * LIMIT_S  # a wait may begin late: a rank has the limit from there, and a moment to say why
AT_ONCE = 2

IN_A_STEP = ("forward 0", "forward 2", "backward 0", "backward 2", "reduce 2")  # and the number of the step
PHASES = ("construct", *IN_A_STEP, "mean_loss 1", "clip 1", "optimizer 1", "between 1", "save 1", "evaluate 2")
ACTS = ("raise", "kill", "stop")
OTHERS: dict[str, Any] = {
    "schedule": "1f1b", "microbatches": 2 * MICROBATCHES, "overlap": "serial", "recompute": "block", "capacity": 4.0,
    "dynamic_shapes": True, "count_tokens": True, "reduce": False, "loss_scale": 2.0, "seed": 1, "top_k": 1,
    "hidden": 2 * HIDDEN, "layers": 6, "dtype": torch.float64, "target_length": 5, "costs": True,
}  # fmt: skip
"""Options of the training loop, and the value that one rank has instead of the others'."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong: ``act`` in ``phase``, or the option ``phase`` that is another, on the rank ``culprit``."""

    number: int
    act: str
    phase: str
    culprit: int
    launcher: str = "fork"  # also "tcp", where rank 0 holds the store, and "torchrun"

    def __str__(self) -> str:
        return f"{self.number:3} {self.act:6} {self.phase:14} on rank {self.culprit} ({self.launcher})"


def every_fault() -> list[Fault]:
    """Each act in each phase on two ranks, each option on one, and each act in some phases under torchrun."""
    found: list[tuple[str, str, int, str]] = []
    first, last, turns = cycle((0, 1)), cycle((2, 3)), cycle(range(RANKS))
    for phase in PHASES:
        for act in ACTS:
            found += [(act, phase, next(first), "fork"), (act, phase, next(last), "fork")]
    found += [("differ", option, next(turns), "fork") for option in OTHERS]
    found += [(act, phase, 0, "tcp") for phase in ("between 1", "forward 2") for act in ACTS]  # rank 0 holds the store
    found += [("nothing", "none", 0, by) for by in ("fork", "tcp")]
    found += [
        (act, phase, next(turns), "torchrun")
        for phase in ("construct", "forward 2", "backward 2", "between 1", "save 1", "none")
        for act in (("raise", "kill") if phase != "none" else ("nothing",))
    ]
    return [Fault(number, act, phase, rank, by) for number, (act, phase, rank, by) in enumerate(found)]


# What a rank does.


class StruckError(ArithmeticError):
    """The fault that raises."""


class Striker:
    """Does what the fault says when its phase comes, on its rank."""

    def __init__(self, fault: Fault, rank: int, folder: Path) -> None:
        self.fault, self.mine, self.folder = fault, rank == fault.culprit, folder
        self.step = -1

    def at(self, phase: str) -> None:
        """The phase, perhaps of a step, is here."""
        if not self.mine or self.fault.phase not in (phase, f"{phase} {self.step}"):
            return
        (self.folder / "struck").write_text(str(time.time()))
        if self.fault.act == "raise":
            raise StruckError("the rank broke")
        os.kill(os.getpid(), signal.SIGKILL if self.fault.act == "kill" else signal.SIGSTOP)

    def option(self, name: str, usual: Any) -> Any:
        """The value of an option on this rank."""
        differs = self.mine and self.fault.act == "differ" and self.fault.phase == name
        return OTHERS[name] if differs else usual


class Block(nn.Module):
    """Norm, router, experts; strikes in a forward, a backward or a ``state_dict``."""

    def __init__(self, hidden: int, top_k: int, group: dist.ProcessGroup, striker: Striker) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(hidden), nn.Linear(hidden, 4)
        self.experts = GroupedExperts(4, hidden, 2 * hidden, group=group)
        self.top_k, self.striker = top_k, striker
        self.register_state_dict_pre_hook(lambda *_: striker.at("save"))

    def forward(self, x: Tensor) -> Tensor:
        self.striker.at("forward" if torch.is_grad_enabled() else "evaluate")
        tokens = self.norm(x).flatten(0, 1)
        weights, indices = self.router(tokens).softmax(-1).topk(self.top_k)
        x = x + self.experts(tokens, indices, weights).view_as(x)
        if x.requires_grad:
            x.register_hook(lambda _: self.striker.at("backward"))
        return x


def build(mesh: DeviceMesh, striker: Striker) -> list[nn.Module]:
    """The whole model on each rank."""
    torch.manual_seed(striker.option("seed", 0))
    hidden, top_k = striker.option("hidden", HIDDEN), striker.option("top_k", 2)
    layers = striker.option("layers", 4)
    blocks = [Block(hidden, top_k, mesh.get_group("ep"), striker) for _ in range(layers)]
    for block in blocks[1:]:
        block.striker = Striker(Fault(-1, "none", "none", -1), 0, striker.folder)  # one a model is enough
    half = len(blocks) // 2
    blocks[0], blocks[half] = (blocks[half], blocks[0]) if mesh["pp"].get_local_rank() else (blocks[0], blocks[half])
    model = [nn.Embedding(VOCAB, hidden), *blocks, nn.Linear(hidden, VOCAB)]
    return [module.to(striker.option("dtype", torch.float32)) for module in model]


def train(fault: Fault, rank: int, folder: Path) -> None:
    """A training loop of a user's own."""
    striker = Striker(fault, rank, folder)
    mesh = init_device_mesh("cpu", (PP, EP), mesh_dim_names=("pp", "ep"))
    model = build(mesh, striker)
    microbatches = striker.option("microbatches", MICROBATCHES)
    program = o1.build_schedule(striker.option("schedule", "combined_1f1b"), ranks=PP, microbatches=microbatches)
    striker.at("construct")
    engine = o1.Engine(
        model,
        program,
        mesh=mesh,
        loss_fn=lambda x, y: nn.functional.cross_entropy(x.flatten(0, 1), y.flatten()),
        options=o1.EngineOptions(
            overlap=striker.option("overlap", 3),
            recompute=striker.option("recompute", "none"),
            capacity=striker.option("capacity", None),
            dynamic_shapes=striker.option("dynamic_shapes", False),
            reduce=striker.option("reduce", True),
            costs=o1.NodeCosts() if striker.option("costs", False) else None,
            count_tokens=(lambda y: y.numel()) if striker.option("count_tokens", False) else None,
            timeout=LIMIT_S,
        ),
    )
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-3)
    for reduction in engine.connection.links.reductions if fault.phase.startswith("reduce") else ():
        reduction.launch = _striking(striker, reduction.launch)  # type: ignore[method-assign]
    for step in range(STEPS):
        striker.step = step
        length = 7
        tokens = torch.randint(VOCAB, (2 * MICROBATCHES, length))
        target = torch.randint(VOCAB, (2 * MICROBATCHES, striker.option("target_length", length)))
        result = engine.step(tokens, target=target, loss_scale=striker.option("loss_scale", 1.0))
        striker.at("mean_loss")
        loss = engine.mean_loss(result)
        striker.at("clip")
        engine.clip_gradients(1.0)
        striker.at("optimizer")
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            o1.save_checkpoint(engine, folder / "checkpoints", step, optimizer)
        if step == 2:
            engine.evaluate(tokens, target=target)
        striker.at("between")
        (folder / f"steps{rank}").write_text(f"{step + 1} {loss}")


def _striking(striker: Striker, launch: Callable[..., Any]) -> Callable[..., Any]:
    def struck(node: Any) -> Any:
        striker.at("reduce")
        return launch(node)

    return struck


# How ranks are started and watched.


@dataclass
class Outcome:
    """How the ranks of a fault ended: statuses as of ``subprocess`` (negative: by a signal), None of one that hung."""

    fault: Fault
    statuses: list[int | None]
    texts: list[str]
    seconds: float
    wrong: list[str] = field(default_factory=list)


def run(fault: Fault, folder: Path) -> Iterator[Outcome | None]:
    """Starts the ranks of a fault; gives None as long as any runs, and then what became of them."""
    under_torchrun = fault.launcher == "torchrun"
    url = f"tcp://127.0.0.1:{_free_port()}" if fault.launcher == "tcp" else f"file://{folder / 'store'}"
    pids = [_torchrun(fault, folder)] if under_torchrun else [_fork(fault, rank, folder, url) for rank in range(RANKS)]
    statuses: dict[int, int | None] = {}
    began = time.time()
    while True:
        for pid in set(pids) - set(statuses):
            with suppress(ChildProcessError):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    statuses[pid] = os.waitstatus_to_exitcode(status)
        struck = folder / "struck"
        since = float(struck.read_text() or began) if struck.exists() else began
        limit = END_S if struck.exists() else 60 + END_S
        running = [rank for rank, pid in enumerate(pids) if pid not in statuses]
        only_stopped = fault.act == "stop" and running == [fault.culprit]
        if running and not only_stopped and time.time() - since < limit:
            yield None
            continue
        took = time.time() - since
        for rank in running:
            (os.killpg if under_torchrun else os.kill)(pids[rank], signal.SIGKILL)
            os.waitpid(pids[rank], 0)
            statuses[pids[rank]] = -signal.SIGKILL if only_stopped else None
        texts = [_text(folder / f"out{rank}") for rank in range(len(pids))]
        yield judged(Outcome(fault, [statuses[pid] for pid in pids], texts, took))
        return


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _fork(fault: Fault, rank: int, folder: Path, url: str) -> int:
    """A rank that ends as a program of its own does: with its interpreter."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    out = os.open(folder / f"out{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    signal.alarm(180)
    raise _Rank(fault, rank, folder, url)


class _Rank(BaseException):
    """Unwinds a forked process to the top of the program, where it becomes a rank."""


def _as_rank(found: _Rank) -> None:
    fault, rank, folder, url = found.args
    torch.set_num_threads(1)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=RANKS, timeout=limit)
    train(fault, rank, folder)  # the engine is dropped here
    if rank % 2:  # either is a program that people write
        gc.collect()
        dist.destroy_process_group()


def _torchrun(fault: Fault, folder: Path) -> int:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command += [__file__, "--only", str(fault.number), "--folder", str(folder)]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    actions = [
        (os.POSIX_SPAWN_OPEN, 1, str(folder / "out0"), os.O_WRONLY | os.O_CREAT, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    return os.posix_spawn(sys.executable, command, environment, file_actions=actions, setsid=True)


# What is right.


def judged(outcome: Outcome) -> Outcome:
    """Adds what went wrong."""
    fault, wrong = outcome.fault, outcome.wrong
    if (
        any("terminate called" in text or "SIGABRT" in text for text in outcome.texts)
        or -signal.SIGABRT in outcome.statuses
    ):
        wrong.append("aborted")
    if None in outcome.statuses:
        wrong.append(f"hung: ranks {[rank for rank, status in enumerate(outcome.statuses) if status is None]}")
    if fault.act == "nothing":
        if any(outcome.statuses):
            wrong.append(f"ended with {outcome.statuses}, not 0")
    elif fault.launcher == "torchrun":
        if outcome.statuses != [1]:
            wrong.append(f"torchrun ended with {outcome.statuses}, not 1")
        if fault.act == "raise" and "StruckError: the rank broke" not in outcome.texts[0]:
            wrong.append("the cause is not told")
    else:
        _judge_ranks(outcome)
    return outcome


def _judge_ranks(outcome: Outcome) -> None:
    fault, wrong = outcome.fault, outcome.wrong
    for rank, (status, text) in enumerate(zip(outcome.statuses, outcome.texts, strict=True)):
        if rank == fault.culprit and fault.act != "differ":
            expected = 1 if fault.act == "raise" else -signal.SIGKILL
            if status not in (expected, None):
                wrong.append(f"rank {rank} ended with {status}, not {expected}")
            continue
        if status == 0:
            wrong.append(f"silent: rank {rank} went on to the end")
        elif status is not None and status != 1:
            wrong.append(f"rank {rank} ended with {status}, not 1")
        if status == 1:
            wrong += [f"rank {rank} does not tell {what}" for what in _untold(fault, text)]


def _untold(fault: Fault, text: str) -> list[str]:
    """What a rank that was not struck does not say: which rank, where, and why."""
    pp, ep = divmod(fault.culprit, EP)
    told = {"the rank": rf"pp {pp}, ep {ep}"}
    if fault.act == "differ":
        told["the value"] = "Expected input batch_size" if fault.phase == "target_length" else "allowed: the same"
    elif fault.act == "raise" and fault.phase != "construct":  # before there is an engine that could tell it
        told["the cause"] = "StruckError: the rank broke"
    if fault.phase.partition(" ")[0] in ("forward", "backward", "reduce", "evaluate") and fault.act != "differ":
        told["the node"] = r"failed (at .* m\d|in \w+|before)"
    return [what for what, pattern in told.items() if not re.search(pattern, text)]


def main() -> int:
    """Runs the faults and prints what went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="*", metavar="N", help="numbers of faults, with what they print")
    parser.add_argument("--list", action="store_true", help="print the faults and run none")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # of a rank under torchrun
    options = parser.parse_args()
    faults = every_fault()
    if options.only == []:
        parser.error("--only without a number; allowed: one or more")
    if options.only and not all(0 <= number < len(faults) for number in options.only):
        parser.error(f"--only {options.only}; allowed: 0 to {len(faults) - 1}")
    chosen = faults if options.only is None else [faults[number] for number in options.only]
    if options.folder is not None:
        torch.set_num_threads(1)
        train(chosen[0], int(os.environ["RANK"]), options.folder)
        return 0
    if options.list:
        print(*chosen, sep="\n")
        return 0
    # Loaded before ranks are forked, for it takes seconds; frozen, so that what they share stays shared when they end.
    for name in ("overlap1f1b.engine", "torch._dynamo", "torch.onnx"):
        importlib.import_module(name)
    gc.freeze()
    outcomes = _all(chosen, verbose=options.only is not None)
    kinds = ("aborted", "hung", "silent")
    counts = {kind: sum(any(w.startswith(kind) for w in o.wrong) for o in outcomes) for kind in kinds}
    bad = sum(bool(outcome.wrong) for outcome in outcomes)
    slowest = max(outcome.seconds for outcome in outcomes)
    print(f"{len(outcomes)} faults, {bad} wrong: {', '.join(f'{n} {kind}' for kind, n in counts.items())}; "
          f"the last rank ended {slowest:.1f} s after the fault at most (limit {LIMIT_S:g} s)")  # fmt: skip
    return int(bad > 0)


def _all(faults: list[Fault], *, verbose: bool) -> list[Outcome]:
    waiting, running, outcomes = faults[::-1], {}, []
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, auto_refresh=False, console=Console(stderr=True)) as progress:  # no thread: ranks are forks
        task = progress.add_task("faults", total=len(faults))
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                folder = Path(tempfile.mkdtemp(prefix="fault-"))
                running[folder] = run(waiting.pop(), folder)
            for folder, states in list(running.items()):
                outcome = next(states)
                if outcome is None:
                    continue
                outcomes.append(outcome)
                del running[folder]
                shutil.rmtree(folder, ignore_errors=True)
                progress.advance(task)
                if verbose or outcome.wrong:
                    progress.print(
                        f"{outcome.fault}: {'; '.join(outcome.wrong) or 'as it should'}, {outcome.seconds:.1f} s"
                    )
                for rank, text in enumerate(outcome.texts if verbose else ()):
                    progress.print(f"--- rank {rank}, status {outcome.statuses[rank]}\n{text}", markup=False)
            progress.refresh()
            time.sleep(0.05)
    return outcomes


if __name__ == "__main__":
    try:
        sys.exit(main())
    except _Rank as found:
        rank_of = found
    _as_rank(rank_of)
