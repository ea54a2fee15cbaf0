"""Are known causes of exposure told apart? Two CPU ranks, a paced link, products that only wait, seeded faults.

    python benchmarks/causes.py                   # 100 mixtures: each fault alone, and all pairs
    python benchmarks/causes.py --mixtures 10 --overlap serial

A fault is a slow rank (its products take longer), a slow link, a late host (a rank pauses between nodes) or a skewed
router (all tokens of some layers go to the experts of one rank). Of each mixture the least of three steps is judged,
by cause, of steps in which no rank waited for a processor: other processes of the machine only add.
A cause is named if it has grown, over both ranks, by a tenth of all growth against steps without faults, and by a
hundredth of a step. A slow rank and a skewed router are both imbalance; ``rows_over_mean`` tells a skewed router.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b import Engine, EngineOptions, build_schedule
from overlap1f1b.moe.router import Router
from overlap1f1b.plan import Node
from overlap1f1b.play.observers import Observer
from overlap1f1b.running.bench.compute import TimedCompute
from overlap1f1b.running.exchanges import PacedExchange
from overlap1f1b.running.ranks import waited_s
from overlap1f1b.running.transformer import MoEConfig, MoETransformer
from overlap1f1b.running.workload import loss_fn
from overlap1f1b.schedule.values import check_size
from overlap1f1b.simulation import CAUSES
from overlap1f1b.transport.exchange import own_exchange

CONFIG = MoEConfig(layers=2, hidden=64, intermediate=64, experts=4, top_k=2, sequence=64, heads=2)
MICROBATCHES, SPEED, GBPS = 4, 3e8, 0.002
QUIET, MOST = 0.01, 10
"""Least part of a step in which a rank waits for a processor that makes a step noisy; most steps of a mixture."""
JUDGED = 3
"""Quiet steps with the faults of a mixture whose least figures are judged, behind one more."""
NAMED = 0.1
"""Least part of the growth of exposure for which a cause is named."""
LEAST = 0.01
"""Least part of a step, for the same."""
SKEWED = 1.15
"""Rows of the rank with most of them over the mean, from which a router is called skewed."""
FAULTS = {"slow rank": "imbalance", "slow link": "link", "late host": "host", "skewed router": "imbalance"}
MIXTURES = [*((fault,) for fault in FAULTS), *combinations(FAULTS, 2)]


class LateHost(Observer):
    """Pauses before some nodes, on a rank that is late."""

    def __init__(self) -> None:
        self.random, self.often, self.seconds = random.Random(0), 0.0, 0.0

    def before(self, node: Node) -> None:
        if self.random.random() < self.often:
            time.sleep(self.seconds)


class Run:
    """One rank: an engine, and the faults that it can have."""

    def __init__(self, rank: int, overlap: Any) -> None:
        self.rank, mesh = rank, init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        self.model = MoETransformer(CONFIG, group=mesh.get_group("ep"), seed=1)
        self.link, self.late = PacedExchange(own_exchange(mesh.get_group("ep")), GBPS), LateHost()
        self.compute = TimedCompute(SPEED)
        program = build_schedule("combined_1f1b", microbatches=MICROBATCHES, extra_warmup=1)
        options = EngineOptions(overlap=overlap, tries=0, verify=False)
        given: Any = {"mesh": mesh, "loss_fn": loss_fn, "options": options, "exchange": self.link}
        self.engine = Engine(self.model, program, **given)
        self.engine.observers.append(self.late)
        torch.manual_seed(rank)
        rows = torch.randint(0, CONFIG.vocabulary, (2 * MICROBATCHES, CONFIG.sequence + 1))
        self.inputs, self.target = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def step(self) -> dict[str, float]:
        """Make a step; return the means of its figures over the ranks."""
        for parameter in self.engine.parameters():
            parameter.grad = None
        before = waited_s()
        metrics = self.engine.step(self.inputs, target=self.target).metrics()
        metrics["waited_ms"] = 1e3 * (waited_s() - before)
        every = self.engine.mesh.every(metrics).values()
        return {key: fmean(one[key] for one in every) for key in metrics}

    def quiet(self) -> dict[str, float]:
        """Return the least figures of the steps in which ranks waited least for a processor."""
        steps: list[dict[str, float]] = []
        while len(steps) < MOST and sum(one["waited_ms"] < QUIET * one["step_ms"] for one in steps) < JUDGED:
            steps.append(self.step())
        steps = sorted(steps, key=lambda one: one["waited_ms"] / one["step_ms"])[:JUDGED]
        return {key: min(one[key] for one in steps) for key in steps[0]}

    @contextmanager
    def faulty(self, mixture: tuple[str, ...], source: random.Random) -> Iterator[None]:
        """Have the faults of a mixture; all ranks draw the same."""
        slow_rank, late_rank, slow = source.randrange(2), source.randrange(2), source.uniform(1.4, 1.9)
        self.late.random, often, seconds = (
            random.Random(source.random()),
            source.uniform(0.1, 0.18),
            source.uniform(16, 32),
        )
        gbps = GBPS * source.uniform(0.35, 0.5)
        routers = [module for module in self.model.modules() if isinstance(module, Router)]
        biased = [router for router in routers if source.random() < 0.7] or routers[:1]
        try:
            if "slow rank" in mixture and self.rank == slow_rank:
                self.compute.speed = SPEED / slow
            if "slow link" in mixture:
                self.link.gbps = gbps
            if "late host" in mixture and self.rank == late_rank:
                self.late.often, self.late.seconds = often, seconds / 1e3
            for router in biased if "skewed router" in mixture else ():
                router.correction_bias[: CONFIG.experts // 2] += 10.0
            yield
        finally:
            self.compute.speed, self.link.gbps, self.late.often = SPEED, GBPS, 0.0
            for router in routers:
                router.correction_bias.zero_()


def rank_of(rank: int, folder: str, options: argparse.Namespace) -> None:
    """Run one rank; the first prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    run = Run(rank, options.overlap)

    def tell(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    with run.compute.entered(run.model):
        while run.engine.tuner.settling:
            run.step()
        told, usual = 0, run.quiet()
        tell(f"without faults: {said(usual)}")
        for number in range(options.mixtures):
            mixture = MIXTURES[number % len(MIXTURES)]
            with run.faulty(mixture, random.Random(options.seed + number)):
                run.step()
                found = run.quiet()
            named, skewed = judged(found, usual)
            right = named == {FAULTS[fault] for fault in mixture} and skewed == ("skewed router" in mixture)
            told += right
            line = f"{number:3} {' + '.join(mixture):28} {said(found)}  → {', '.join(sorted(named))}"
            tell(line if right else f"{line}  WRONG")
    tell(f"{told} of {options.mixtures} mixtures told apart")
    run.engine.close()
    dist.destroy_process_group()


def judged(found: Mapping[str, float], usual: Mapping[str, float]) -> tuple[set[str], bool]:
    """Return the causes that have grown, and whether a router is skewed."""
    keys = {cause: f"exposed_by_cause_ms/{cause}" for cause in CAUSES if cause != "order"}
    growth = {cause: max(0.0, found[key] - usual[key]) for cause, key in keys.items()}
    total = sum(growth.values())
    rows = max(value for key, value in found.items() if key.startswith("rows_over_mean"))
    least = max(NAMED * total, LEAST * found["step_ms"])
    return {cause for cause, time in growth.items() if time > least}, rows > SKEWED


def said(found: Mapping[str, float]) -> str:
    """Return the figures of a step in a line."""
    causes = "  ".join(f"{cause} {found[f'exposed_by_cause_ms/{cause}']:5.1f}" for cause in CAUSES[:4])
    return f"step {found['step_ms']:4.0f} ms, exposed {found['exposed_ms']:5.1f}: {causes}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixtures", type=int, default=100)
    parser.add_argument("--seed", type=int, default=64)
    parser.add_argument("--overlap", default="2")
    options = parser.parse_args(arguments)
    check_size("mixtures", options.mixtures)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_of, (folder, options), nprocs=2)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
