"""Compiled layers of transformers and the same layers uncompiled, over a shaped wire: is the exchange hidden as much?

    python benchmarks/compiled.py                               # 2 ranks, 200 Mbit/s; needs root and transformers
    python benchmarks/compiled.py --backend inductor --timeout 900 --json compiled.json  # compiles for minutes on a CPU
    python benchmarks/compiled.py --layers 2 --hidden 64 --sequence 64 --rounds 1     # that it runs at all

Both rows play a Qwen3-MoE of the same weights on the same tokens, with real compute. Their steps take turns in one
process; the first ones, which compile and measure the nodes, do not count. Figures are medians: a time is the slowest
rank's, a hidden share the least of any rank. Gradients of the last step are compared.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool of processes beside the ranks

import torch
from rich.console import Console

from overlap1f1b.engine import Engine, EngineOptions
from overlap1f1b.integrations.transformers import split_model
from overlap1f1b.running.bench.measure import slowest, timed
from overlap1f1b.running.launch import STORE, end_with, run_ranks
from overlap1f1b.running.ranks import Rank, joined
from overlap1f1b.running.wire import Balanced, Wire, parse_wire
from overlap1f1b.running.workload import environment
from overlap1f1b.schedule import build_schedule
from overlap1f1b.terminal.output import Say, check_files, console, plain_table, showing, write_json

RANKS = 2
ROWS = ("uncompiled", "compiled")
WARM = 4  # steps that compile and measure the nodes, and the first ones of the plan


def engine_of(row: str, options: argparse.Namespace, rank: Rank) -> Engine:
    """Return the engine of a row, on a model with the same weights every time."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=256,
            hidden_size=options.hidden,
            num_hidden_layers=options.layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=options.hidden // 4,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=2 * options.hidden,
        )
    )
    if row == "compiled":
        for layer in model.model.layers:
            layer.compile(backend=options.backend)
    program = build_schedule("combined_1f1b", microbatches=options.microbatches, extra_warmup=1)
    stages = split_model(model, program, rank.mesh)
    return Engine(
        stages,
        program,
        mesh=rank.mesh,
        loss_fn=stages.loss_fn,
        options=EngineOptions(reduce=False, timeout=options.timeout, tries=0, verify=False),
    )


def measure(options: argparse.Namespace, rank: Rank, say: Say) -> list[dict[str, Any]]:
    """Return the figures of both rows; every rank takes part."""
    from torch._dynamo.utils import counters

    engines = {row: engine_of(row, options, rank) for row in ROWS}
    generator = torch.Generator().manual_seed(rank.data_rank)
    tokens = torch.randint(256, (2 * options.microbatches, options.sequence), generator=generator)
    found: dict[str, list[tuple[float, float, float]]] = {row: [] for row in ROWS}
    for turn in range(WARM + options.rounds):
        for row, engine in engines.items():
            say(f"{max(0, turn - WARM)} of {options.rounds} rounds done, {row} plays step {turn + 1}")
            for parameter in engine.parameters():
                parameter.grad = None
            seconds, result = timed(partial(engine.step, tokens, target=tokens), rank)
            overlap = result.overlap
            hidden = -slowest(-overlap.hidden_fraction, rank)
            if turn >= WARM:
                found[row].append((1e3 * seconds, hidden, 1e3 * slowest(overlap.exposed, rank)))
    plain, compiled = ([p.grad for p in engines[row].parameters() if p.grad is not None] for row in ROWS)
    off = max(float((a - b).norm() / b.norm()) for a, b in zip(compiled, plain, strict=True) if b.norm())
    rows = []
    for row, samples in found.items():
        step, hidden, exposed = (median(sample) for sample in zip(*samples, strict=True))
        rows.append({"row": row, "step_ms": step, "hidden_fraction": hidden, "exposed_ms": exposed})
        rows[-1]["samples"] = samples
    rows[-1] |= {"graphs": counters["stats"]["unique_graphs"], "relative_grad_difference": slowest(off, rank)}
    for engine in engines.values():
        engine.close()
    return rows


def show(rows: list[dict[str, Any]], options: argparse.Namespace, screen: Console) -> None:
    """Print a table."""
    table = plain_table(("layers", "step ms", "hidden", "exposed ms"), ("layers",))
    for row in rows:
        figures = f"{row['step_ms']:.0f}", f"{row['hidden_fraction']:.1%}", f"{row['exposed_ms']:.0f}"
        table.add_row(row["row"], *figures)
    screen.print(table, highlight=False)
    last = rows[-1]
    screen.print(
        f"{options.backend}, {last['graphs']} graphs; gradients differ by up to {last['relative_grad_difference']:.1e}",
        highlight=False,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, what in (
        ("layers", 4, "layers"), ("hidden", 256, "hidden size"), ("sequence", 256, "tokens of a sequence"),
        ("microbatches", 8, "microbatches of a step, of two sequences"), ("rounds", 5, "measured rounds"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default: {default})")
    parser.add_argument("--wire", default="200mbit", help="rate of the link (default: 200mbit)")
    parser.add_argument("--backend", default="aot_eager", help="of torch.compile (default: aot_eager)")
    parser.add_argument("--timeout", type=float, default=300.0, help="limit of every wait in seconds (default: 300)")
    parser.add_argument("--json", help="file for the results; - for the standard output")
    options = parser.parse_args()
    try:
        if isinstance(rate := parse_wire(options.wire), Balanced):
            raise ValueError(f"--wire {options.wire}; allowed: a rate such as 200mbit")
        check_files({"json": options.json})
    except ValueError as error:
        parser.error(str(error))
    if STORE not in os.environ:
        with Wire(RANKS, rate) as wire:
            return run_ranks(sys.argv[1:], RANKS, wire=wire, command=(sys.executable, __file__))

    def run() -> int:
        with joined((1, 1, RANKS), options.timeout) as rank:
            screen = console(options.json, quiet=rank.rank != 0)
            with showing(screen, "starting") as say:
                rows = measure(options, rank, say)
            if not rank.rank:
                show(rows, options, screen)
                named = {name: value for name, value in vars(options).items() if name not in ("json", "timeout")}
                write_json(options.json, {"environment": environment(rank), "workload": named, "rows": rows})
        return 0

    end_with(run)


if __name__ == "__main__":
    sys.exit(main())
