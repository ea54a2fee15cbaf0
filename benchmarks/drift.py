"""Does a run follow a link that slows down, and leave noise alone? Two CPU ranks, a paced link, products that wait.

    python benchmarks/drift.py               # the link's rate is halved after 60 steps
    python benchmarks/drift.py --noise 500   # each exchange takes up to 10 % more or less, for 500 steps
    python benchmarks/drift.py --noise 500 --part 0   # nothing changes but the load of the machine
    python benchmarks/drift.py --cost 16     # processor time of what watches, of 16 steps

Printed: when the engine went over to another plan, and the medians of steps before, behind the change and at the end.
Then an engine measures its costs with the slow link from the beginning, for the best order of the new rate. Losses are
compared with those of a plain loop over the same batches.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b import Engine, EngineOptions, StepResult, build_schedule
from overlap1f1b.engine.gate import Gate
from overlap1f1b.learn.tuner import Tuner
from overlap1f1b.running.bench.compute import TimedCompute
from overlap1f1b.running.exchanges import PacedExchange
from overlap1f1b.running.transformer import MoEConfig, MoETransformer
from overlap1f1b.running.workload import loss_fn
from overlap1f1b.transport.exchange import Transfer, own_exchange

CONFIG = MoEConfig(layers=2, hidden=64, intermediate=64, experts=4, top_k=2, sequence=64, heads=2)
MICROBATCHES, SPEED, GBPS = 4, 0.3e9, 0.0015
"""Exchanges take half as long as compute: with half the rate another order hides more, by prediction."""
BEFORE, BEHIND, LAST = 20, 50, 11
NOISE = 0.1
GATE = 0.1


class NoisyExchange(PacedExchange):
    """A paced link whose rate varies by up to ``noise`` for each transfer."""

    noise = 0.0
    source = random.Random(0)

    def rows(self, source: Tensor, send: Sequence[int], receive: Sequence[int], *others: Any) -> Transfer[Tensor]:
        rate, self.gbps = self.gbps, self.gbps * self.source.uniform(1 - self.noise, 1 + self.noise)
        try:
            return super().rows(source, send, receive, *others)
        finally:
            self.gbps = rate


def engine_of(gbps: float, options: argparse.Namespace) -> tuple[Engine, NoisyExchange, TimedCompute]:
    """Return an engine, its link, and its compute, which is to be entered."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    model = MoETransformer(CONFIG, group=mesh.get_group("ep"), seed=1)
    link = NoisyExchange(own_exchange(mesh.get_group("ep")), gbps)
    given: Any = {"mesh": mesh, "loss_fn": loss_fn, "exchange": link}
    program = build_schedule("combined_1f1b", microbatches=MICROBATCHES, extra_warmup=1)
    wanted = EngineOptions(overlap=3, verify=False, drift=True, gate=GATE if options.cost else None)
    return Engine(model, program, options=wanted, **given), link, TimedCompute(SPEED)


def play(
    rank: int, gbps: float, changed: float, options: argparse.Namespace
) -> tuple[list[float], list[str], list[float]]:
    """Return the seconds of settled steps and of all behind the change, what was said, and the losses."""
    engine, link, compute = engine_of(gbps, options)
    seconds, said, losses = list[float](), list[str](), list[float]()
    torch.manual_seed(rank)
    rows = torch.randint(0, CONFIG.vocabulary, (2 * MICROBATCHES, CONFIG.sequence + 1))
    with compute.entered(engine.model), warnings.catch_warnings(record=True) as caught:  # type: ignore[arg-type]
        warnings.simplefilter("always")
        steps = options.noise or BEFORE + BEHIND
        while engine.tuner.settling:
            engine.step(rows[:, :-1].contiguous(), target=rows[:, 1:].contiguous())
        first = engine.plan
        for number in range(steps):
            if number == BEFORE and not options.noise:
                link.gbps = changed
            link.noise = options.part if options.noise else 0.0
            engine.mesh.barrier()
            start = time.perf_counter()
            result = engine.step(rows[:, :-1].contiguous(), target=rows[:, 1:].contiguous())
            seconds.append(max(engine.mesh.every(time.perf_counter() - start).values()))
            losses.append(engine.mean_loss(result))
            if caught:
                said += [f"step {number - BEFORE} behind the change: {one.message}" for one in caught]
                caught.clear()
        said.append(f"plan {'unchanged' if engine.plan.fingerprint == first.fingerprint else 'changed'}")
    engine.close()
    return seconds, said, losses


@contextmanager
def clocked(owner: type, name: str, spent: Counter[str]) -> Iterator[None]:
    """Sum the processor time of the main thread in a method of a class."""
    method = getattr(owner, name)

    def timed(*arguments: Any, **options: Any) -> Any:
        since = time.thread_time()
        try:
            return method(*arguments, **options)
        finally:
            spent[f"{owner.__name__}.{name}"] += time.thread_time() - since

    setattr(owner, name, timed)
    try:
        yield
    finally:
        setattr(owner, name, method)


def watched(rank: int, options: argparse.Namespace) -> list[str]:
    """Return what pooling, watching, the gate and metrics take of a step in which nothing changes."""
    engine, _, compute = engine_of(GBPS, options)
    rows = torch.randint(0, CONFIG.vocabulary, (2 * MICROBATCHES, CONFIG.sequence + 1))
    spent, seconds = Counter[str](), list[float]()
    watches = ((Tuner, "pooled"), (Tuner, "_watch"), (Gate, "found"), (StepResult, "metrics"))
    with compute.entered(engine.model), ExitStack() as stack:  # type: ignore[arg-type]
        while engine.tuner.settling:
            engine.step(rows[:, :-1].contiguous(), target=rows[:, 1:].contiguous())
        for owner, name in watches:
            stack.enter_context(clocked(owner, name, spent))
        for _ in range(options.cost):
            start = time.perf_counter()
            engine.step(rows[:, :-1].contiguous(), target=rows[:, 1:].contiguous()).metrics()
            seconds.append(time.perf_counter() - start)
    engine.close()
    mean, lines = fmean(seconds), list[str]()
    lines.append(f"{len(engine.plan.ranks[0])} nodes, a step of {1e3 * mean:.0f} ms; ms of processor a step:")
    lines += [f"  {name}: {1e3 * of / options.cost:.2f}" for name, of in spent.items()]
    return [*lines, f"{spent.total() / options.cost / mean:.2%} of a step"]


def rank_of(rank: int, folder: str, options: argparse.Namespace) -> None:
    """Run one rank; the first prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    seconds, lines, losses = ([], watched(rank, options), []) if options.cost else play(rank, GBPS, GBPS / 2, options)
    if options.noise:
        lines.append(f"{options.noise} steps with {options.part:.0%} of noise, median {1e3 * median(seconds):.0f} ms")
    elif not options.cost:
        best, _, _ = play(rank, GBPS / 2, GBPS / 2, options)
        before, behind, end = (seconds[BEFORE - LAST : BEFORE], seconds[BEFORE : BEFORE + 10], seconds[-LAST:])
        times = ", ".join(f"{1e3 * median(part):.0f}" for part in (before, behind, end, best[-LAST:]))
        lines.append(f"ms of a step before, 10 behind the change, at the end, best for the new rate: {times}")
        lines.append(f"losses of all steps {'equal' if len(set(losses)) == 1 else 'DIFFERENT'}")
    if rank == 0:
        print("\n".join(lines))
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--noise", type=int, default=0)
    parser.add_argument("--cost", type=int, default=0)
    parser.add_argument("--part", type=float, default=NOISE)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_of, (folder, options), nprocs=2)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
