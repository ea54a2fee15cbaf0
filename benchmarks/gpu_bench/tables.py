"""The results as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

Row = TypeVar("Row")


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
        if (result := entry.get("result")) is None:
            continue
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


def table(rows: Iterable[Row], columns: Mapping[str, Callable[[Row], str]]) -> str:
    """A column for each heading, with a text of each row; the first to the left, all others to the right."""
    lines = [[*columns], ["---", *["--:"] * (len(columns) - 1)]]
    lines += [[text(row) for text in columns.values()] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float | None, form: str) -> str:
    """Or a dash."""
    return "–" if value is None else format(value, form)


def _checks(result: dict[str, Any]) -> list[str]:
    wrong = sum(outcome != "ok" for outcome in result["outcomes"].values())
    return [f"{len(result['outcomes']) - wrong} of {len(result['outcomes'])} checks are in order."]


def _ceilings(result: dict[str, Any]) -> list[str]:
    columns = {"ceiling": lambda item: item[0].replace("_", " "), "value": lambda item: f"{item[1]:.1f}"}
    return [table(result.items(), columns)]


def _compiles(result: dict[str, Any]) -> list[str]:
    slowest = sorted(result["rows"], key=lambda row: -row["seconds"])[:5]
    rows = [{"name": "all", "seconds": result["seconds"]}, *slowest]
    columns = {"kernel": lambda row: row["name"], "s": lambda row: f"{row['seconds']:.1f}"}
    return [f"First calls of {len(result['rows'])} kernels, the slowest of them:", table(rows, columns)]


def _nccl(result: dict[str, Any]) -> list[str]:
    columns = {
        "sent by a rank": lambda row: f"{row['bytes'] / 2**20:.1f} MiB, {'uneven' if row['uneven'] else 'equal'}",
        "alone ms": lambda row: f"{row['exchange_ms']:.3f}",
        "products ms": lambda row: f"{row['products_ms']:.3f}",
        "both ms": lambda row: f"{row['both_ms']:.3f}",
        "GB/s": lambda row: f"{row['gb_s']:.1f}",
        "hidden": lambda row: f"{row['hidden']:.0%}",
    }
    return [table(result["rows"], columns)] if result["rows"] else []


def _kernels(result: dict[str, Any]) -> list[str]:
    columns = {
        "kernel, shape": lambda row: f"{row['kernel']}, {row['shape']['name']}",
        "Triton ms": lambda row: number(row.get("triton_ms"), ".3f"),
        "of the roofline": lambda row: number(row.get("roofline"), ".0%"),
        "eager ms": lambda row: number(row.get("eager_ms"), ".3f"),
        "compiled ms": lambda row: number(row.get("compiled_ms"), ".3f"),
        "error": lambda row: number(row.get("error"), ".1e"),
    }
    return [table(result["rows"], columns)]


def _layer(result: dict[str, Any]) -> list[str]:
    columns = {
        "layer": lambda row: row["shape"]["name"],
        "forward + backward ms": lambda row: f"{row['both_ms']:.3f}",
        "TFLOP/s": lambda row: f"{row['both_tflop_s']:.1f}",
        "products alone ms": lambda row: f"{row['gemm_ms']:.3f}",
        "of their bound": lambda row: f"{row['share_of_gemm']:.0%}",
        "loop ms": lambda row: f"{row['loop_ms']:.3f}",
        "over loop": lambda row: f"{row['over_loop']:.2f}×",
        "weights inside ms": lambda row: f"{row['inside_ms']:.3f}",
        "held GiB": lambda row: _gibibytes(row["held_bytes"]),
        "weights inside, held GiB": lambda row: _gibibytes(row["inside_held_bytes"]),
    }
    return [table(result["rows"], columns)]


def _eight(result: dict[str, Any]) -> list[str]:
    columns = {
        "experts": lambda row: row["shape"]["name"],
        "bf16 forward, both ms": lambda row: f"{row['bf16_forward_ms']:.3f}, {row['bf16_both_ms']:.3f}",
        "fp8 forward, both ms": lambda row: f"{row['fp8_forward_ms']:.3f}, {row['fp8_both_ms']:.3f}",
        "speed-up": lambda row: f"{row['layer_speedup']:.2f}×",
        "product, bf16 and fp8 ms": lambda row: f"{row['bf16_product_ms']:.3f}, {row['fp8_product_ms']:.3f}",
        "quantize rows, weight ms": lambda row: f"{row['quantize_rows_ms']:.3f}, {row['quantize_weight_ms']:.3f}",
        "error of the product, layer": lambda row: f"{row['error']:.1e}, {row['layer_error']:.1e}",
    }
    return [table(result["rows"], columns)]


def _gibibytes(size: int | None) -> str:
    return number(None if size is None else size / 2**30, ".2f")


def _steps(result: dict[str, Any]) -> list[str]:
    columns = {
        "program": lambda row: f"`{row['name']}`",
        "step ms": lambda row: "{median:.1f} ({min:.1f}–{max:.1f})".format(**row["step_ms"]),
        "queued after ms": lambda row: f"{row['queued_ms']:.1f}",
        "speed-up": lambda row: f"{row['speedup']:.2f}×",
        "over bound": lambda row: f"{row['over_bound']:.3f}",
        "exposed ms": lambda row: f"{row['exposed_ms']:.1f}",
        "hidden": lambda row: f"{row['hidden_fraction']:.0%}",
        "predicted ms": lambda row: f"{row['predicted_ms']:.1f}",
        "peak GiB": lambda row: f"{row['peak_bytes'] / 2**30:.1f}",
        "SM MHz": lambda row: number(row.get("sm_mhz"), ".0f"),
        "retries": lambda row: str(row["allocator_retries"]),
        "gradients": lambda row: "equal" if row["grads_equal"] else "differ",
    }
    parts = []
    for t in result["tables"]:
        parts.append(
            f"**{t['layers']} layers, {t['routing']} routing, exchange : compute "
            f"{t['exchange_only_ms'] / t['compute_only_ms']:.2f}** "
            f"({t['gbps']:.1f} GB/s each way asked for; compute only {t['compute_only_ms']:.1f} ms, "
            f"exchange only {t['exchange_only_ms']:.1f} ms, bound {t['bound_ms']:.1f} ms)"
        )
        parts.append(table(t["rows"], columns))
    return parts


def _overhead(result: dict[str, Any]) -> list[str]:
    columns = {
        "loop": lambda row: row["name"],
        "step ms": lambda row: f"{row['step_ms']:.2f}",
        "over plain": lambda row: f"{row['over_plain']:.3f}",
        "queued after ms": lambda row: number(row.get("launch_ms"), ".2f"),
    }
    return [table(result["rows"], columns)]


def _memory(result: dict[str, Any]) -> list[str]:
    columns = {
        "limit": lambda row: row["name"],
        "predicted": lambda row: f"{row['predicted']:.2f}",
        "held": lambda row: f"{row['held']:.2f}",
        "step ms": lambda row: f"{row['step_ms']:.1f}",
        "copies GB": lambda row: number(row.get("moved", 0) / 1e9, ".2f"),
        "GB/s": lambda row: number(row.get("gbps"), ".1f"),
        "program": lambda row: f"`{row['program']} · {row['order']}`",
    }
    return [f"In plain loops, each {_gibibytes(result['plain_bytes'])} GiB:", table(result["rows"], columns)]


def _contention(result: dict[str, Any]) -> list[str]:
    columns = {
        "product, blocks that spin": lambda row: f"{row['product']}, {row['blocks']}",
        "alone ms": lambda row: f"{row['alone_ms']:.3f}",
        "beside them": lambda row: f"{row['all_ms'] / row['alone_ms']:.2f}×",
        "best carved out": lambda row: "{1:.2f}× ({0})".format(*_best_carved(row)),
        "same bits": lambda row: "yes" if all(row["same_bits"].values()) else "no",
    }
    return [table(result["rows"], columns)]


def _best_carved(row: dict[str, Any]) -> tuple[int, float]:
    carved, took = min(row["carved_ms"].items(), key=lambda item: item[1])
    return carved, took / row["alone_ms"]


def _trace(result: dict[str, Any]) -> list[str]:
    return [f"`{result['timeline']}` (the engine's timeline), `{result['trace']}` (the profiler's)."]


SHOWN: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "checks": _checks,
    "ceilings": _ceilings,
    "contention": _contention,
    "compiles": _compiles,
    "kernels": _kernels,
    "layer": _layer,
    "eight": _eight,
    "steps": _steps,
    "overhead": _overhead,
    "memory": _memory,
    "offload": _memory,
    "trace": _trace,
    "nccl": _nccl,
}
