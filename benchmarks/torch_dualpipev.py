"""torch's ScheduleDualPipeV with and without the engine registered, over a real slow link (root).

    python benchmarks/torch_dualpipev.py                # pp2 × ep2, exchange ≈ compute
    python benchmarks/torch_dualpipev.py --rate 200mbit --microbatches 8 --rounds 5 --json dualpipev.json

Two pipeline ranks, each with two stages of a V, times ``--ep`` ranks that share the experts; every rank in a network
namespace, both the expert exchange and the transfers between stages on its link. Compute is timed: a matrix product
waits for its operations over the measured speed of one instead of computing, as a GPU would leave the processor, since
four ranks share two cores; routers, tensors, autograd and transfers are real. Rows are interleaved in one process.
Gradients are compared first, with real compute. ``bound`` is the larger of a rank's waits for products in a step and
its bytes of the exchange over the link's rate; the pipeline's bubble comes on top of it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleDualPipeV

from overlap1f1b.cli.bench.hollow import HollowCompute, hollow
from overlap1f1b.cli.bench.measure import FRAMES
from overlap1f1b.cli.launch import STORE, run_ranks
from overlap1f1b.cli.ranks import joined
from overlap1f1b.cli.rate import parse_rate
from overlap1f1b.cli.wire import INTERFACE, Wire, shape
from overlap1f1b.cli.workload import loss_fn
from overlap1f1b.integrations.torch_pipelining import register
from overlap1f1b.moe import GroupedExperts, MoEConfig, MoETransformer
from overlap1f1b.moe.exchange import Exchange, Transfer, build_exchange, lane_groups
from overlap1f1b.plan import Overlap

PIPELINE = 2
V = ((0, 3), (1, 2))
SPEED = "OVERLAP1F1B_PRODUCTS_PER_S"
ROWS: tuple[Overlap | None, ...] = (None, "serial", "pairs", 2)  # None: not registered


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ep", type=int, default=2, help="ranks that share the experts")
    parser.add_argument("--rate", default="balanced", help="of a rank's link: 200mbit, or as long as compute")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--layers", type=int, default=8, help="divided over four stages")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--intermediate", type=int, default=512)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2, help="sequences of a microbatch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slower", type=float, default=1.0, help="factor of the waits, so that all else weighs less")
    parser.add_argument("--json", help="file for the results")
    return parser.parse_args()


def measured_speed() -> float:
    """Operations a second of a matrix product of the experts' size on one thread."""
    torch.set_num_threads(1)
    a, b, seconds = torch.randn(256, 256), torch.randn(256, 1024), []
    for _ in range(50):
        start = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - start)
    return 2 * 256 * 256 * 1024 / median(seconds)


class TimedCompute(HollowCompute):
    """Products wait for their time; waits shorter than half a millisecond are gathered, since sleeping is no finer."""

    def __init__(self, speed: float) -> None:
        super().__init__()
        self.speed, self.total, self._owed = speed, 0.0, 0.0

    def _wait(self, operations: float) -> None:
        self.total += operations / self.speed
        self._owed += operations / self.speed
        if self._owed > 5e-4:
            start = time.perf_counter()
            time.sleep(self._owed)
            self._owed -= time.perf_counter() - start

    def _mm(self, a: Tensor, b: Tensor, **_: Any) -> Tensor:
        self._wait(2 * a.shape[0] * a.shape[1] * b.shape[1])
        return super()._mm(a, b)

    def _mm_out(self, a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
        self._wait(2 * a.shape[0] * a.shape[1] * b.shape[1])
        return super()._mm_out(a, b, out=out)

    def _bmm(self, a: Tensor, b: Tensor, **_: Any) -> Tensor:
        self._wait(2 * a.numel() * b.shape[2])
        return super()._bmm(a, b)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self._wait(2 * q.numel() * k.shape[-2])  # causal: half of two products
        return super()._attention(q, k, v)

    def _attention_backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Any:
        self._wait(5 * q.numel() * k.shape[-2])  # half of five
        return super()._attention_backward(grad, q, k, v)


class Counting:
    """The experts' own exchange, counting the bytes that leave this rank."""

    def __init__(self, real: Exchange) -> None:
        self.real, self.ranks, self.rank, self.background = real, real.ranks, real.rank, real.background
        self.counts, self.expect_rows, self.expect_counts = real.counts, real.expect_rows, real.expect_counts
        self.sent = 0

    def rows(self, source: Tensor, send: Sequence[int], *rest: Any, **options: Any) -> Transfer:
        self.sent += (sum(send) - send[self.rank]) * source[:1].nbytes
        return self.real.rows(source, send, *rest, **options)


class Rank:
    """One rank's stages, schedule and batch."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        mesh = init_device_mesh("cpu", (PIPELINE, options.ep), mesh_dim_names=("pp", "ep"))
        pp, self.ep = mesh.get_group("pp"), mesh.get_group("ep") if options.ep > 1 else None
        config = MoEConfig(
            vocabulary=256,
            layers=options.layers,
            hidden=options.hidden,
            intermediate=options.intermediate,
            sequence=options.sequence,
        )
        model = MoETransformer(config, group=self.ep)
        self.exchange = build_exchange(self.ep, *(lane_groups(self.ep, 3) if self.ep else ()))
        cuts = [round(1 + stage * options.layers / 4) for stage in range(5)]
        cuts[0], cuts[-1] = 0, options.layers + 2
        self.stages = [
            PipelineStage(model[cuts[i] : cuts[i + 1]], i, 4, torch.device("cpu"), group=pp) for i in V[pp.rank()]
        ]
        self.first = pp.rank() == 0
        self.schedule = ScheduleDualPipeV(self.stages, options.microbatches, loss_fn)
        self.model = torch.nn.ModuleList(stage.submod for stage in self.stages)
        generator = torch.Generator().manual_seed(dist.get_rank() % options.ep)
        shape = (options.microbatches * options.batch, options.sequence + 1)
        self.tokens = torch.randint(256, shape, generator=generator)

    def step(self, row: Overlap | None) -> float:
        """Seconds of the slowest rank."""
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        registration = None if row is None else register(self.schedule, overlap=row, exchange=self.exchange)
        inputs, target = (self.tokens[:, :-1],), self.tokens[:, 1:]
        dist.barrier()
        start = time.perf_counter()
        self.schedule.step(*(inputs if self.first else ()), target=target if self.first else None)
        took = largest(time.perf_counter() - start)
        if registration is not None:
            registration.remove()
        return took

    def gradients_equal(self) -> bool:
        """Whether every row gives torch's own gradients, bit for bit, with real compute."""
        found = []
        for row in ROWS:
            self.step(row)
            found.append([p.grad.clone() for p in self.model.parameters() if p.grad is not None])
        same = all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
        return largest(float(not same)) == 0.0

    def counted(self) -> float:
        """Bytes that the experts' exchange of a step sends from the busiest rank."""
        experts = [m for m in self.model.modules() if isinstance(m, GroupedExperts)]
        counting = [Counting(m.exchange) for m in experts]
        for module, exchange in zip(experts, counting, strict=True):
            module.exchange = exchange
        self.step(None)
        for module, exchange in zip(experts, counting, strict=True):
            module.exchange = exchange.real
        return largest(float(sum(exchange.sent for exchange in counting)))


def largest(value: float) -> float:
    found = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    rank = Rank(options)
    equal = rank.gradients_equal()
    compute = TimedCompute(float(os.environ[SPEED]) / options.slower)
    samples: dict[str, list[float]] = {str(row): [] for row in ROWS}
    with hollow(rank.model, compute):
        rank.step(None)
        compute.total = 0.0
        sent = rank.counted()
        seconds = largest(compute.total)
        rate = 8 * sent / seconds / FRAMES if options.rate == "balanced" else parse_rate(options.rate)
        dist.barrier()
        shape(os.environ[INTERFACE], rate)
        dist.barrier()
        for turn in range(options.rounds + 1):  # the first is for warming up
            for row in ROWS:
                took = rank.step(row)
                if turn:
                    samples[str(row)].append(took)
    plain = median(samples["None"])
    return {
        "workload": vars(options),
        "rate_mbit": rate / 1e6,
        "compute": "timed",
        "compute_ms": 1e3 * seconds,
        "exchange_ms": 8e3 * sent / rate / FRAMES,
        "grads_equal": equal,
        "rows": [
            {
                "row": "torch" if name == "None" else f"registered, {name}",
                "step_ms": {"min": 1e3 * min(s), "median": 1e3 * median(s), "max": 1e3 * max(s)},
                "speedup": plain / median(s),
            }
            for name, s in samples.items()
        ],
    }


def show(result: dict[str, Any], path: str | None) -> None:
    print(
        f"rate {result['rate_mbit']:.0f} Mbit/s, a rank's products {result['compute_ms']:.0f} ms, "
        f"its exchange {result['exchange_ms']:.0f} ms, gradients {'equal' if result['grads_equal'] else 'DIFFER'}"
    )
    for row in result["rows"]:
        step = row["step_ms"]
        print(f"{row['row']:20} {step['median']:8.0f} ms ({step['min']:.0f}–{step['max']:.0f})  {row['speedup']:.2f}×")
    if path:
        with open(path, "w") as file:
            json.dump(result, file, indent=2)


def main() -> int:
    options = arguments()
    if STORE not in os.environ:
        os.environ[SPEED] = str(measured_speed())
        ranks = PIPELINE * options.ep
        with Wire(ranks) as wire:
            return run_ranks(sys.argv, ranks, wire=wire, command=(sys.executable,))
    with joined((PIPELINE, 1, options.ep), 120.0) as rank:
        result = measure(options)
        if rank.rank == 0:
            show(result, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
