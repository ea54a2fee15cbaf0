"""The results as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def markdown(found: dict[str, Any]) -> str:
    """Every section that has been measured."""
    environment = found["environment"]
    versions = ", ".join(f"{name} {environment[name]}" for name in ("torch", "cuda", "triton") if environment.get(name))
    parts = [f"# {environment['device']}, {found['date']}", f"{versions}."]
    if found["options"]["tiny"]:
        parts.append("Tiny sizes, to see that the script runs: the figures mean nothing.")
    if late := not_fitted(found):
        parts.append(f"Did not fit the {found['options']['budget_s']:.0f} s: {'; '.join(late)}.")
    for name, entry in found["sections"].items():
        parts.append(f"## {name}")
        if entry["status"] == "no time":
            parts.append("Not measured: no time left.")
            continue
        if entry["status"] == "failed":
            parts.append(f"Failed: `{entry['error']}`")
            continue
        result = entry["result"]
        parts += SHOWN[name](result)
        if result.get("skipped"):
            parts.append("Not measured: " + "; ".join(result["skipped"]) + ".")
        if result.get("problems"):
            parts.append("Problems: " + "; ".join(result["problems"]) + ".")
    return "\n\n".join(parts) + "\n"


def not_fitted(found: dict[str, Any]) -> list[str]:
    """Whole sections, and how much of others, for which there was no time."""
    late = []
    for name, entry in found["sections"].items():
        parts = sum("no time left" in why for why in (entry.get("result") or {}).get("skipped", ()))
        if entry["status"] == "no time":
            late.append(name)
        elif parts:
            late.append(f"{parts} of {name}")
    return late


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column to the left, all others to the right."""
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float | None, form: str) -> str:
    """Or a dash."""
    return "–" if value is None else format(value, form)


def _checks(result: dict[str, Any]) -> list[str]:
    wrong = sum(outcome != "ok" for outcome in result["outcomes"].values())
    return [f"{len(result['outcomes']) - wrong} of {len(result['outcomes'])} checks are in order."]


def _ceilings(result: dict[str, Any]) -> list[str]:
    return [table(["ceiling", "value"], [[name.replace("_", " "), f"{value:.1f}"] for name, value in result.items()])]


def _compiles(result: dict[str, Any]) -> list[str]:
    slowest = sorted(result["rows"], key=lambda row: -row["seconds"])[:5]
    rows = [["all", f"{result['seconds']:.1f}"], *([row["name"], f"{row['seconds']:.1f}"] for row in slowest)]
    return [f"First calls of {len(result['rows'])} kernels, the slowest of them:", table(["kernel", "s"], rows)]


def _nccl(result: dict[str, Any]) -> list[str]:
    rows = [
        [
            f"{row['bytes'] / 2**20:.1f} MiB, {'uneven' if row['uneven'] else 'equal'}",
            *(f"{row[name]:.3f}" for name in ("exchange_ms", "products_ms", "both_ms")),
            f"{row['gb_s']:.1f}",
            f"{row['hidden']:.0%}",
        ]
        for row in result["rows"]
    ]
    return [table(["sent by a rank", "alone ms", "products ms", "both ms", "GB/s", "hidden"], rows)] if rows else []


def _kernels(result: dict[str, Any]) -> list[str]:
    rows = [
        [
            f"{row['kernel']}, {row['shape']['name']}",
            number(row.get("triton_ms"), ".3f"),
            number(row.get("roofline"), ".0%"),
            number(row.get("eager_ms"), ".3f"),
            number(row.get("compiled_ms"), ".3f"),
            number(row.get("error"), ".1e"),
        ]
        for row in result["rows"]
    ]
    return [table(["kernel, shape", "Triton ms", "of the roofline", "eager ms", "compiled ms", "error"], rows)]


def _layer(result: dict[str, Any]) -> list[str]:
    rows = [
        [
            row["shape"]["name"],
            f"{row['both_ms']:.3f}",
            f"{row['both_tflop_s']:.1f}",
            f"{row['gemm_ms']:.3f}",
            f"{row['share_of_gemm']:.0%}",
            f"{row['loop_ms']:.3f}",
            f"{row['over_loop']:.2f}×",
            f"{row['inside_ms']:.3f}",
            *(number(b and b / 2**30, ".2f") for b in (row["held_bytes"], row["inside_held_bytes"])),
        ]
        for row in result["rows"]
    ]
    head = ["layer", "forward + backward ms", "TFLOP/s", "products alone ms", "of their bound", "loop ms", "over loop"]
    head += ["weights inside ms", "held GiB", "weights inside, held GiB"]
    return [table(head, rows)]


def _steps(result: dict[str, Any]) -> list[str]:
    parts = []
    for t in result["tables"]:
        parts.append(
            f"**{t['layers']} layers, {t['routing']} routing, exchange : compute {t['ratio']:.2f}** "
            f"({t['gbps']:.1f} GB/s each way; compute only {t['compute_only_ms']:.1f} ms, "
            f"exchange only {t['exchange_only_ms']:.1f} ms, bound {t['bound_ms']:.1f} ms)"
        )
        rows = [
            [
                f"`{row['name']}`",
                f"{row['step_ms']['median']:.1f} ({row['step_ms']['min']:.1f}–{row['step_ms']['max']:.1f})",
                f"{row['speedup']:.2f}×",
                f"{row['over_bound']:.3f}",
                f"{row['exposed_ms']:.1f}",
                f"{row['hidden_fraction']:.0%}",
                f"{row['predicted_ms']:.1f}",
                f"{row['peak_bytes'] / 2**30:.1f}",
                str(row["allocator_retries"]),
                "equal" if row["grads_equal"] else "differ",
            ]
            for row in t["rows"]
        ]
        head = [
            "program",
            "step ms",
            "speed-up",
            "over bound",
            "exposed ms",
            "hidden",
            "predicted ms",
            "peak GiB",
            "retries",
        ]
        parts.append(table([*head, "gradients"], rows))
    return parts


def _overhead(result: dict[str, Any]) -> list[str]:
    rows = [
        [row["name"], f"{row['step_ms']:.2f}", f"{row['over_plain']:.3f}", number(row.get("launch_ms"), ".2f")]
        for row in result["rows"]
    ]
    return [table(["loop", "step ms", "over plain", "queued after ms"], rows)]


def _trace(result: dict[str, Any]) -> list[str]:
    return [f"`{result['timeline']}` (the engine's timeline), `{result['trace']}` (the profiler's)."]


SHOWN: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "checks": _checks,
    "ceilings": _ceilings,
    "compiles": _compiles,
    "kernels": _kernels,
    "layer": _layer,
    "steps": _steps,
    "overhead": _overhead,
    "trace": _trace,
    "nccl": _nccl,
}
