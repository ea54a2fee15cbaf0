"""Runs the sections one after another, each within its part of the time, and writes what they found."""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
import re
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from gpu_bench import (
    ceilings,
    checks,
    compiles,
    contention,
    eight,
    kernels,
    layer,
    memory,
    nccl,
    offload,
    overhead,
    steps,
    trace,
)
from gpu_bench.context import Context, NoTimeError
from gpu_bench.tables import markdown

SECTIONS: dict[str, tuple[Callable[[Context], dict[str, Any]], float]] = {
    "ceilings": (ceilings.run, 10),
    "contention": (contention.run, 20),
    "compiles": (compiles.run, 60),
    "checks": (checks.run, 40),
    "kernels": (kernels.run, 100),
    "layer": (layer.run, 40),
    "eight": (eight.run, 30),
    "steps": (steps.run, 210),
    "overhead": (overhead.run, 25),
    "memory": (memory.run, 40),
    "offload": (offload.run, 40),
    "trace": (trace.run, 15),
    "nccl": (nccl.run, 20),
}
"""Each with the seconds that it may take of the default budget; what one leaves, the next may use.

Ceilings are first, since the roofline needs them; then all compilers, apart from what is timed.
"""
RESULTS = Path(__file__).resolve().parents[1] / "results"


def main() -> None:
    """The command."""
    options = parse()
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    out = Path(options.out)
    day = f"{datetime.now(UTC):%Y-%m-%d-%H%M}"
    path = out / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}-{day}"
    context = Context(device, tiny=options.tiny, quick=options.quick, path=str(path))
    found: dict[str, Any] = {
        "environment": environment(name, device),
        "options": {"tiny": options.tiny, "quick": options.quick, "budget_s": options.budget},
        "date": day,
        "sections": {},
    }
    scale = options.budget / sum(seconds for _, seconds in SECTIONS.values())
    gc.freeze()  # collections between measurements do not look at what was imported
    begun, due = time.monotonic(), 0.0
    for title, (section, seconds) in SECTIONS.items():
        due += seconds * scale
        if title not in options.sections:
            continue
        context.deadline = begun + due
        print(f"{title}: until {due:.0f} s of {options.budget:.0f} s", flush=True)

        def keep(result: dict[str, Any], name: str = title) -> None:
            written(found, path, name, {"status": "unfinished", "result": result})

        context.keep = keep
        entry = attempted(section, context)
        entry = found["sections"].get(title, {}) | entry  # with what a section that failed has kept
        context.results[title] = entry.get("result") or {}
        print(f"  {entry['status']} after {entry['seconds']:.1f} s {entry.get('error', '')}", flush=True)
        written(found, path, title, entry)
    print(markdown(found))
    print(f"written: {path.with_suffix('.json')}, {path.with_suffix('.md')}")
    if any(entry["status"] != "ok" for entry in found["sections"].values()):
        raise SystemExit("not all sections are in order: see their status")


def written(found: dict[str, Any], path: Path, title: str, entry: dict[str, Any]) -> None:
    """Write everything with this section's entry: the run may be ended before it is whole."""
    found["sections"][title] = entry
    path.with_suffix(".json").write_text(json.dumps(finite(found), indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown(found))


def parse() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description="Measures kernels, layers, steps and overhead on one GPU.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for a test of the script itself")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--sections", default=",".join(SECTIONS), help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--budget", type=float, default=520.0, help="seconds for all sections")
    parser.add_argument("--out", default=str(RESULTS), help="folder of the results")
    options = parser.parse_args()
    options.sections = options.sections.split(",")
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"--sections {', '.join(sorted(unknown))}; allowed: {', '.join(SECTIONS)}")
    if re.fullmatch(r"cpu|cuda(:\d+)?", options.device) is None:
        parser.error(f"--device {options.device}; allowed: cpu, cuda, or a number of a GPU, as cuda:1")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {options.device} without a GPU; allowed here: --device cpu --tiny")
    if not 0 < options.budget < math.inf:
        parser.error(f"--budget {options.budget}; allowed: seconds > 0")
    try:
        Path(options.out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {options.out}: {error.strerror}; allowed: a folder that can be written")
    return options


def attempted(section: Callable[[Context], dict[str, Any]], context: Context) -> dict[str, Any]:
    """What a section found, or how it failed."""
    begun = time.monotonic()
    entry: dict[str, Any] = {"status": "ok"}
    try:
        if context.left <= 0:
            raise NoTimeError("no time left")
        entry["result"] = section(context)
        if entry["result"].get("problems"):
            entry["status"] = "problems"
    except NoTimeError as error:
        entry |= {"status": "no time", "error": str(error)}
    except Exception as error:
        entry |= {"status": "failed", "error": f"{type(error).__name__}: {error}"}
        # No paths of the machine: where in which file, and what.
        frames = traceback.extract_tb(error.__traceback__)
        entry["traceback"] = [f"{Path(f.filename).name}:{f.lineno} {f.name}: {f.line}" for f in frames]
    try:
        context.free()
    except Exception as error:  # a fault of the device stays with it: the rest will fail, and say so
        entry |= {"status": "failed", "error": entry.get("error", f"{type(error).__name__}: {error}")}
    entry["seconds"] = time.monotonic() - begun
    return entry


def environment(name: str, device: torch.device) -> dict[str, Any]:
    """What the figures were measured on; nothing that names the machine."""
    found: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version(), "device": name}
    try:
        import triton

        found["triton"] = triton.__version__
    except ImportError:
        found["triton"] = None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "cuda": torch.version.cuda,
            "capability": list(torch.cuda.get_device_capability(device)),
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": properties.total_memory / 2**30,
        }
    return found


def finite(value: Any) -> Any:
    """The same with None for numbers that JSON does not know."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
