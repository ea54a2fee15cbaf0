"""The host's own work in a step: layers so small that Python is everything, beside a plain loop of the same calls.

    python benchmarks/engine_walk.py                             # all rows, about a minute
    python benchmarks/engine_walk.py --rows linears,moe --microbatches 64
    python benchmarks/engine_walk.py --against ../before         # the same of another checkout, in turns

Rows: *dense* (a norm and three linear layers), *linears* (eight of them), *moe* (a transformer layer with our experts),
*qwen3* (Qwen3-MoE of transformers, beside its own forward), each on one rank without an exchange; *nodes*, the layers
of *moe* while an observer asks for every node; *lanes*, the same over two ranks that share the experts, beside a plain
loop that waits for every exchange; and *interleaved*, eight dense blocks over two ranks of a pipeline, two chunks each,
beside torch's ScheduleInterleaved1F1B.

A step of the engine and one of the loop are played in turns, in one process. Printed are the medians of a rank, for
each layer and microbatch: user-mode instructions of the thread that plays, where the system counts them
(``perf_event_open``), and processor time of the process. Instructions repeat to half a percent, times to a tenth.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b import Engine, NodeCosts, build_schedule
from overlap1f1b.engine import EngineOptions
from overlap1f1b.moe import MoE, RouterConfig

try:
    from overlap1f1b.play.observers import Observer
except ImportError:  # another checkout, before there were observers
    Observer = object

TOKENS, HIDDEN, LAYERS = 16, 8, 4
COSTS = NodeCosts.uniform(attention=1, experts=1, dispatch=1, dense=1)

Step = Callable[[], object]


class Rank(NamedTuple):
    """This process; ``mesh`` has the dimensions "pp" and "ep", None for a single rank."""

    number: int
    mesh: Any
    microbatches: int


class Played(NamedTuple):
    """A step of the engine, the same of a plain loop, and in how many layers of this rank."""

    engine: Step
    plain: Step
    layers: int


class Dense(nn.Module):
    """A norm and three linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.a, self.b, self.c = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.c(self.b(self.a(self.norm(x))))
        return y


class Layer(nn.Module):
    """A transformer layer whose attention is one matrix product."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)])
        self.attention = nn.Linear(HIDDEN, HIDDEN)
        self.moe = MoE(HIDDEN, HIDDEN, RouterConfig(experts=4, top_k=2), group=group)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        y: Tensor = x + self.moe(self.norms[1](x))
        return y


class EveryNode(Observer):  # type: ignore[misc] # of an older checkout
    """Asks for every node, and does nothing with it."""

    def before(self, node: object) -> None:
        """Do nothing."""


def loss_fn(x: Tensor, *_: Tensor) -> Tensor:
    """Return the sum."""
    return x.sum()


def beside_loop(
    blocks: list[nn.Module], rank: Rank, *, schedule: str = "sequential", overlap: Any = "serial", nodes: bool = False
) -> Played:
    """Return steps over tokens of a stage, and a loop over the same."""
    count = rank.microbatches
    inputs = torch.randn(count * TOKENS, HIDDEN)
    options = EngineOptions(costs=COSTS, overlap=overlap)
    program = build_schedule(schedule, microbatches=count)
    engine = Engine(blocks, program, mesh=rank.mesh, loss_fn=loss_fn, options=options)
    if nodes:
        engine.observers.append(EveryNode())
    model, parts = nn.Sequential(*blocks), inputs.split(TOKENS)

    def loop() -> None:
        for x in parts:
            model(x).sum().backward()

    return Played(partial(engine.step, inputs, target=inputs), loop, len(blocks))


def qwen3(rank: Rank) -> Played:
    """Return steps of a tiny Qwen3-MoE, and of its own forward."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from overlap1f1b.integrations.transformers import split_model

    sizes = {"num_experts": 4, "moe_intermediate_size": HIDDEN, "head_dim": 4, "num_experts_per_tok": 2}
    sizes |= {"vocab_size": 32, "hidden_size": HIDDEN, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen3MoeConfig(num_hidden_layers=LAYERS, intermediate_size=HIDDEN, use_cache=False, **sizes)
    model = Qwen3MoeForCausalLM(config)
    own = Qwen3MoeForCausalLM(config)
    program = build_schedule("sequential", microbatches=rank.microbatches)
    stages = split_model(model, program)
    options = EngineOptions(costs=COSTS, overlap="serial")
    engine = Engine(stages, program, loss_fn=stages.loss_fn, options=options)
    ids = torch.randint(0, 32, (rank.microbatches, TOKENS))

    def loop() -> None:
        for row in ids.split(1):
            own(row, labels=row).loss.backward()

    return Played(partial(engine.step, ids, target=ids), loop, LAYERS)


def interleaved(rank: Rank) -> Played:
    """Return steps of eight dense blocks over a pipeline, and of torch's schedule over copies of them."""
    from torch.distributed import pipelining

    blocks, group = [Dense() for _ in range(8)], rank.mesh.get_group("pp")
    program = build_schedule("interleaved_1f1b", ranks=2, chunks=2, microbatches=rank.microbatches)
    engine = Engine(blocks, program, mesh=rank.mesh, loss_fn=loss_fn, options=EngineOptions(costs=COSTS))
    copies = [nn.Sequential(Dense(), Dense()) for _ in range(2)]
    device = torch.device("cpu")
    stages = [
        pipelining.PipelineStage(copy, 2 * chunk + rank.number, 4, device, group=group)
        for chunk, copy in enumerate(copies)
    ]
    torchs = pipelining.ScheduleInterleaved1F1B(stages, rank.microbatches, loss_fn)
    inputs = torch.randn(rank.microbatches * TOKENS, HIDDEN)

    def loop() -> None:
        torchs.step(*(() if rank.number else (inputs,)), **({"target": inputs} if rank.number else {}))

    return Played(partial(engine.step, inputs, target=inputs), loop, 4)


ROWS: dict[str, tuple[int, Callable[[Rank], Played]]] = {
    "dense": (1, lambda rank: beside_loop([Dense() for _ in range(LAYERS)], rank)),
    "linears": (1, lambda rank: beside_loop(list(_linears()), rank)),
    "moe": (1, lambda rank: beside_loop([Layer() for _ in range(LAYERS)], rank)),
    "nodes": (1, lambda rank: beside_loop([Layer() for _ in range(LAYERS)], rank, nodes=True)),
    "qwen3": (1, qwen3),
    "lanes": (2, lambda rank: beside_loop(_layers(rank), rank, schedule="combined_1f1b", overlap=3)),
    "interleaved": (2, interleaved),
}
"""Number of ranks of each row, and what is played."""


def _linears() -> list[nn.Module]:
    return [nn.Sequential(*[nn.Linear(HIDDEN, HIDDEN) for _ in range(8)]) for _ in range(LAYERS)]


def _layers(rank: Rank) -> list[nn.Module]:
    return [Layer(rank.mesh.get_group("ep")) for _ in range(LAYERS)]


def instructions() -> Callable[[], int] | None:
    """Return what reads the user-mode instructions of this thread; None where the system does not count them."""
    call = {"x86_64": 298, "aarch64": 241}.get(platform.machine())
    if not sys.platform.startswith("linux") or call is None:
        return None
    hardware, instructions_, exclude_kernel, exclude_hypervisor = 0, 1, 1 << 5, 1 << 6
    attributes = bytearray(128)
    struct.pack_into("IIQ", attributes, 0, hardware, len(attributes), instructions_)
    struct.pack_into("Q", attributes, 40, exclude_kernel | exclude_hypervisor)
    given = (ctypes.c_char * len(attributes)).from_buffer(attributes)
    this_thread, any_processor, no_group = 0, -1, -1
    file = ctypes.CDLL(None, use_errno=True).syscall(call, given, this_thread, any_processor, no_group, 0)
    return None if file < 0 else lambda: int.from_bytes(os.read(file, 8), sys.byteorder)


def figures(name: str, rank: Rank, rounds: int) -> dict[str, float]:
    """Return the medians of a row, for each layer and microbatch."""
    played = ROWS[name][1](rank)
    meters: dict[str, Callable[[], float]] = {"us": lambda: 1e6 * time.process_time()}
    if (counter := instructions()) is not None:
        meters = {"instructions": counter, **meters}
    found: dict[str, list[float]] = {f"{who}_{what}": [] for who in ("engine", "plain") for what in meters}
    for turn in range(rounds + 3):
        for who, step in (("engine", played.engine), ("plain", played.plain)):
            before = [read() for read in meters.values()]
            step()
            after = [read() for read in meters.values()]
            for what, start, end in zip(meters, before, after, strict=True):
                if turn >= 3:  # the first compile the plan, and show how blocks use their parameters
                    found[f"{who}_{what}"].append((end - start) / played.layers / rank.microbatches)
    return {key: median(values) for key, values in found.items()}


def measured(names: list[str], options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the figures of rows, those over two ranks of the first of them."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if options.rank is None:
        return {name: figures(name, Rank(0, None, options.microbatches), options.rounds) for name in names}
    (name,) = names
    dist.init_process_group("gloo", init_method=f"tcp://{options.address}", rank=options.rank, world_size=2)
    shape = (2, 1) if name == "interleaved" else (1, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "ep"))
    if name == "interleaved":
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    found = {name: figures(name, Rank(options.rank, mesh, options.microbatches), options.rounds)}
    dist.barrier()
    dist.destroy_process_group()
    return found


def run(names: list[str], options: argparse.Namespace, folder: str) -> dict[str, dict[str, float]]:
    """Measure rows with the package of a checkout: those on one rank in one process, others in two each."""
    words = [*options.python.split(), os.path.abspath(__file__), "--json", "-"]
    words += ["--microbatches", str(options.microbatches), "--rounds", str(options.rounds)]
    environment = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
    found: dict[str, dict[str, float]] = {}
    alone = [name for name in names if ROWS[name][0] == 1]
    for some in [alone] * bool(alone) + [[name] for name in names if ROWS[name][0] == 2]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        here = [*words, "--rows", ",".join(some)]
        every = [[*here, "--rank", str(rank), "--address", address] for rank in range(2)] if some != alone else [here]
        ranks = [subprocess.Popen(one, env=environment, stdout=subprocess.PIPE, text=True) for one in every]
        try:
            said = [rank.communicate(timeout=600)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(rank.returncode for rank in ranks):
            raise SystemExit(f"a rank of {','.join(some)} failed")
        found |= json.loads(said[0])
    return found


def line(name: str, found: dict[str, float]) -> str:
    """Return the figures of a row as text."""
    said = []
    for what, unit, by in (("instructions", "k instructions", 1e-3), ("us", "µs", 1)):
        if (plain := found.get(f"plain_{what}")) is not None:
            said.append(f"{by * plain:7.0f} {unit} plain, engine {found[f'engine_{what}'] / plain:.3f}")
    return f"{name:12} {'; '.join(said)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), help=f"some of {', '.join(ROWS)}")
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--against", help="folder of another checkout to measure in turns with this one")
    parser.add_argument("--turns", type=int, default=3, help="turns of each checkout")
    parser.add_argument("--json", help="file for the results; - for the standard output, and nothing else there")
    parser.add_argument("--python", default=sys.executable, help="what runs a rank")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.rows.split(",")
    if not set(names) <= set(ROWS):
        parser.error(f"--rows {options.rows}; allowed: some of {', '.join(ROWS)}")
    if min(options.microbatches, options.rounds, options.turns) < 1:
        parser.error("--microbatches, --rounds and --turns; allowed: 1 or more")
    if options.against and not os.path.isdir(os.path.join(options.against, "overlap1f1b")):
        parser.error(f"--against {options.against}; allowed: a folder with the package overlap1f1b")
    if options.json == "-":
        print(json.dumps(measured(names, options)))
        return
    if instructions() is None:
        print("this system counts no instructions: processor time alone", file=sys.stderr)
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    folders = {"before": os.path.abspath(options.against), "now": here} if options.against else {"now": here}
    turns: dict[str, list[dict[str, dict[str, float]]]] = {name: [] for name in folders}
    for _ in range(options.turns if options.against else 1):
        for name, folder in folders.items():
            turns[name].append(run(names, options, folder))
            for row in names:
                print(f"{name:7}" * bool(options.against) + line(row, turns[name][-1][row]), flush=True)
    result = {
        name: {row: {key: median(turn[row][key] for turn in every) for key in every[0][row]} for row in names}
        for name, every in turns.items()
    }
    if options.against:
        for row in names:
            for name in folders:
                print(f"median {name:7}{line(row, result[name][row])}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file, indent=2)


if __name__ == "__main__":
    main()
