"""Activations in host memory, on a shaped link of two ranks (needs root): the step, and what it holds.

    python benchmarks/offload.py                       # exchange about as long as compute
    python benchmarks/offload.py --mbit 400 --rounds 5  # a faster link between the ranks

Four layers over ep 2, six microbatches, products that only wait (timed compute), a link to host memory that is paced.
In turns: a plan without a limit; a plain loop; a plain loop inside hooks that copy what autograd saves to the host and
back and wait for it, as torch's ``save_on_cpu`` does, over the same link; and within what each of these two holds, or
little more, the plan of a limit alone and with ``offload="auto"``. Printed: the median step, over the plan's prediction
and over that by the medians of compute and copies in the same steps; and the most bytes at once, over those predicted.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b import Engine, build_schedule
from overlap1f1b.cut.options import Offload
from overlap1f1b.engine import EngineOptions
from overlap1f1b.learn.measure import measured_costs
from overlap1f1b.learn.memory import ByteCount
from overlap1f1b.plan import RESOURCE_OF, Resource, Span
from overlap1f1b.running.bench.compute import TimedCompute
from overlap1f1b.running.transformer import MoEConfig, MoETransformer
from overlap1f1b.running.wire import Wire
from overlap1f1b.simulation import play_nodes

CONFIG = MoEConfig(layers=4, hidden=256, intermediate=256, experts=4, top_k=2, sequence=128, heads=4)
MICROBATCHES, SPEED, LEAST = 6, 2.4e10, 16384
CPU, MORE = torch.device("cpu"), 1.12
"""``MORE``: a segment comes back as a whole, and not tensor by tensor, so the least that its plan holds is more."""


class Holding(TimedCompute):
    """Products wait, and return memory of their own: else all activations would share one buffer of zeros."""

    def _zero(self, like: Tensor, *shape: int) -> Tensor:
        return like.new_zeros(shape)


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy of ``[B, S, V]``."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


class Row:
    """An engine that is measured; ``room`` is the most that it may hold beyond what there is before a step."""

    def __init__(
        self,
        mesh: dist.DeviceMesh,
        link: float,
        room: float | None = None,
        offload: Offload = False,
        *,
        plain: bool = False,
        waits: bool = False,
    ) -> None:
        self.link, self.waits, self.seconds, self.peak = link, waits, list[float](), 0
        self.spans: list[Span] = []
        self.model = MoETransformer(CONFIG, seed=1, group=mesh.get_group("ep"))
        with ByteCount(CPU) as count:
            pass
        name, more = ("sequential", {}) if plain else ("combined_1f1b", {"extra_warmup": 1})
        options = EngineOptions(
            memory="1TB" if room is None else int(count.before + room),
            overlap="serial" if plain else 3,
            offload=offload,
            offload_threshold=LEAST,
            host_link=link if offload else None,
            tries=0,
            verify=False,
            timeout=120,
        )
        program = build_schedule(name, microbatches=MICROBATCHES, **more)  # type: ignore[arg-type]
        self.engine = Engine(self.model, program, mesh=mesh, loss_fn=loss_fn, options=options)

    def settle(self, x: Tensor, y: Tensor) -> None:
        """Play the steps that measure, and one whose bytes are counted."""
        while self.engine.tuner.settling:
            self.step(x, y)
        with ByteCount(CPU) as count:
            self.step(x, y)
        self.peak, self.seconds, self.spans = count.peak, [], []

    def step(self, x: Tensor, y: Tensor) -> None:
        """Play a step, without gradients of an earlier one."""
        for parameter in self.model.parameters():
            parameter.grad = None
        with Holding(SPEED).entered(self.model), self._hooks():
            begin = time.perf_counter()
            result = self.engine.step(x, target=y)
            self.seconds.append(time.perf_counter() - begin)
        self.spans += result.overlap.spans

    def by_same_steps(self) -> float:
        """Return the plan's step by what its compute and copies took in these; all ranks must call this."""
        plan, costs = self.engine.plan, self.engine.costs
        assert costs is not None
        took = measured_costs(plan.ranks[0], self.spans, self.engine.mesh, shared_links=costs.shared_links).by_node
        mine = {key: cost for key, cost in took.items() if RESOURCE_OF[key[0]] in (Resource.COMPUTE, Resource.HOST)}
        costs = replace(costs, by_node={**costs.by_node, **mine})
        return play_nodes(plan, costs).makespan

    def _hooks(self) -> AbstractContextManager[Any]:
        """Return hooks that wait for each copy, where it does; weights stay."""
        if not self.waits:
            return nullcontext()
        weights = {parameter.untyped_storage().data_ptr() for parameter in self.model.parameters()}

        def pack(tensor: Tensor) -> Any:
            if tensor.untyped_storage().data_ptr() in weights or tensor.nbytes < LEAST:
                return tensor
            time.sleep(tensor.nbytes / self.link / 1e9)
            return tensor.detach().numpy().copy()

        def unpack(kept: Any) -> Tensor:
            if isinstance(kept, Tensor):
                return kept
            time.sleep(kept.nbytes / self.link / 1e9)
            back = torch.empty(kept.shape, dtype=torch.from_numpy(kept[:0]).dtype)
            back.numpy()[...] = kept
            return back

        return saved_tensors_hooks(pack, unpack)


def measure(rank: int, address: str, rounds: int, link: float) -> None:
    """Play all engines in turns; rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    text = torch.randint(256, (4 * MICROBATCHES, 129), generator=torch.Generator().manual_seed(rank))
    x, y = text[:, :-1], text[:, 1:]
    rows: dict[str, Row] = {}

    def add(name: str, room: float | None = None, offload: Offload = False, **given: bool) -> Row:
        rows[name] = row = Row(mesh, link, room, offload, **given)
        row.settle(x, y)
        return row

    add("no limit")
    plain = add("plain loop", plain=True)
    waiting = add("plain loop that waits for copies", plain=True, waits=True)
    for name, peak in (("a plain loop's", plain.peak), (f"{MORE} of the waiting loop's", int(MORE * waiting.peak))):
        peaks = [torch.tensor(peak) for _ in range(2)]
        dist.all_gather(peaks, torch.tensor(peak))
        room = max(int(one) for one in peaks)
        for offload in (False, "auto"):
            try:
                add(f"within {name}, offload={offload}", room, offload)  # type: ignore[arg-type]
            except ValueError as error:
                del rows[f"within {name}, offload={offload}"]
                if rank == 0:
                    print(f"within {name}, offload={offload}: {error}", flush=True)
    for _ in range(rounds):
        for row in rows.values():
            row.step(x, y)
    best, again = median(rows["no limit"].seconds), {name: row.by_same_steps() for name, row in rows.items()}
    for name, row in rows.items() if rank == 0 else ():
        plan, seconds = row.engine.plan, median(row.seconds)
        moved = sum(map(len, plan.offloads.values()))
        print(
            f"{name}: {seconds:.2f} s, {seconds / best:.3f} × no limit, {seconds / plan.predicted:.3f} × predicted, "
            f"{seconds / again[name]:.3f} × by the same steps; "
            f"holds {row.peak / plain.peak:.2f} plain loops, {row.peak / plan.peak_bytes[0]:.3f} × predicted; "
            f"{moved} leave; {plan.program.name} {plan.order}",
            flush=True,
        )
    for row in rows.values():
        row.engine.close()
    dist.destroy_process_group()


def main() -> None:
    """Start two ranks on a wire of their own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=200, help="rate of the link between the ranks, Mbit/s")
    parser.add_argument("--host-link", type=float, default=0.2, help="rate of the link to host memory, GB/s each way")
    parser.add_argument("--rounds", type=int, default=3, help="steps of each engine")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        measure(options.rank, options.address, options.rounds, options.host_link)
        return
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    with Wire(ranks=2, rate=options.mbit * 1e6) as wire:
        words = [sys.executable, __file__, "--rounds", str(options.rounds), "--address", f"{wire.address(0)}:{port}"]
        words += ["--host-link", str(options.host_link)]
        ranks = [
            subprocess.Popen([*wire.prefix(rank), *words, "--rank", str(rank)], env=os.environ | wire.environment(rank))
            for rank in range(2)
        ]
        try:
            status = max(rank.wait(900) for rank in ranks)
        finally:
            for one in ranks:
                one.kill()
    sys.exit(status)


if __name__ == "__main__":
    main()
