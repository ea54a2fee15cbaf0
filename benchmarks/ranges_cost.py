"""What ranges cost: the same step without and with them, under torch.profiler and not.

    python benchmarks/ranges_cost.py                            # the model of overlap1f1b train, one rank

Steps are timed interleaved; medians over the rounds. ``off`` has no recorder; ``ranges`` writes one for every node,
action and step with no profiler to read them; ``profiler`` is torch.profiler without ranges, ``both`` with them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile

from overlap1f1b import Engine, build_schedule
from overlap1f1b.engine import EngineOptions
from overlap1f1b.record.recorder import Recorder, TorchRanges
from overlap1f1b.running.transformer import MoEConfig, MoETransformer
from overlap1f1b.running.workload import loss_fn
from overlap1f1b.terminal.output import write_json

MODES = ("off", "ranges", "profiler", "both")


@contextmanager
def mode(name: str, engine: Engine) -> Iterator[None]:
    devices = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    profiled = profile(activities=[ProfilerActivity.CPU, *devices]) if name in ("profiler", "both") else nullcontext()
    with profiled, Recorder(engine, TorchRanges()) if name in ("ranges", "both") else nullcontext():
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    sizes = {"layers": 4, "hidden": 256, "sequence": 256, "microbatches": 4, "rounds": 15}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", help="file for the results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = MoEConfig(layers=options.layers, hidden=options.hidden, sequence=options.sequence)
    model = MoETransformer(config, device=device)
    program = build_schedule("combined_1f1b", microbatches=options.microbatches)
    engine = Engine(model, program, loss_fn=loss_fn, options=EngineOptions(overlap=3, tries=0, verify=False))
    inputs = torch.randint(256, (2 * options.microbatches, options.sequence), device=device)
    took: dict[str, list[float]] = {name: [] for name in MODES}
    for turn in range(options.rounds + 3):  # the first measure nodes
        for name in MODES:
            with mode(name, engine):
                start = time.perf_counter()
                engine.step(inputs, target=inputs)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                if turn > 2:
                    took[name].append(time.perf_counter() - start)
    ms = {name: 1e3 * median(times) for name, times in took.items()}
    paired = {
        name: median(a / b for a, b in zip(took[name], took[base], strict=True)) - 1
        for name, base in (("ranges", "off"), ("both", "profiler"))
    }
    result = {"nodes": len(engine.plan.nodes), "ms": ms, "ranges_over_off": paired["ranges"],
              "both_over_profiler": paired["both"]}  # fmt: skip
    print(
        f"{result['nodes']} nodes; ms of a step: " + ", ".join(f"{name} {value:.1f}" for name, value in ms.items())
        + f"; ranges cost {paired['ranges']:+.1%}, under torch.profiler {paired['both']:+.1%}"
    )  # fmt: skip
    write_json(options.json, result)


if __name__ == "__main__":
    main()
