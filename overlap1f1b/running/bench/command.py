"""``overlap1f1b bench`` on one rank: measure, print, write."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from overlap1f1b.plan import rows_per_token
from overlap1f1b.running.bench.measure import Bench
from overlap1f1b.running.options import BenchOptions
from overlap1f1b.running.ranks import Rank
from overlap1f1b.running.workload import environment, workload
from overlap1f1b.schedule.values import counted
from overlap1f1b.terminal.output import console, number, plain_table, print_lines, showing, write_json

LEAST_OVER_BOUND = 0.98
MOST_OFF = 0.1  # of what was expected


def kind_of(options: BenchOptions) -> type[Bench]:
    if options.hf_config is not None:
        from overlap1f1b.running.bench.hf import HfBench

        return HfBench
    if options.pp > 1:
        from overlap1f1b.running.bench.pipelines import PipelineBench  # torch's own schedules take most of a second

        return PipelineBench
    return Bench


def bench(options: BenchOptions, rank: Rank) -> None:
    """Measure every row; the first rank reports."""
    screen = console(options.json, quiet=rank.rank != 0)
    with showing(screen, "starting") as say:
        result = kind_of(options)(options, rank, say).run()
    if rank.rank:
        return
    names = ("pp", "dp", "ep", "microbatches", "batch", "sequence", "rounds", "recompute", "parts", "capacity")
    result = {"environment": environment(rank), "workload": workload(options, *names)} | result
    result["doubts"] = doubts(result)
    show(result, screen)
    write_json(options.json, result)


def doubts(result: dict[str, Any]) -> list[str]:
    """Return the errors of measurement that the JSON of ``bench`` shows, one line each.

    No step is faster than its compute or exchanges alone, and these take their bytes over the wire's rate. Timed
    compute can be predicted: if it is not, the processor has too little time for everything else, above all for Python.
    """
    found = [
        f"{row['program']} · {row['overlap']}: over bound {row['over_bound']:.4f} is under {LEAST_OVER_BOUND}"
        for row in result["rows"]
        if row["over_bound"] < LEAST_OVER_BOUND
    ]
    took, expected = result["exchange_only_ms"], result["wire"]["bytes_over_rate_ms"]
    if expected and abs(took / expected - 1) > MOST_OFF:
        found.append(f"exchange only {took:.0f} ms is not within {MOST_OFF:.0%} of bytes over rate, {expected:.0f} ms")
    if result["compute"] == "timed":
        share = result.get("processor_share")
        busy = "" if share is None else f", with processors {share:.0%} busy"
        for row in result["rows"]:
            predicted, took = row["predicted_ms"], row["step_ms"]["median"]
            if predicted is not None and abs(predicted / took - 1) > MOST_OFF:
                name = f"{row['program']} · {row['overlap']}"
                found.append(f"{name}: {predicted:.0f} ms were predicted of {took:.0f}{busy}")
    return found


def show(result: dict[str, Any], screen: Console) -> None:
    wire, rate = result["wire"], result["wire"]["rate_gbps"]
    link = wire["kind"] if rate is None else f"shaped to {1e3 * rate:.0f} Mbit/s"
    if wire["kind"] == "host":
        link = "through host memory" + ("" if rate is None else f" at {rate / 8:g} GB/s")
    ranks = result["environment"]["ranks"]
    sent = f"{wire['bytes_sent'] / 2**20:.1f} MiB sent a step"
    screen.print(f"[bold]{counted(ranks, 'rank')}[/bold], {link}, {result['compute']} compute, {sent}")
    if result["plain_ms"] is not None:
        screen.print(f"one rank, no exchange: the bound is a plain loop, {result['plain_ms']:.0f} ms")
    sizes = result.get("workload", {})
    if "top_k" in sizes and sizes["ep"] > 1:
        rows = rows_per_token(sizes["experts"], sizes["top_k"], sizes["ep"])
        sent = f"a token of {sizes['top_k']} choices is sent to {rows:.2f} of {sizes['ep']} ranks"
        screen.print(f"{sent}, itself included, if all experts are equally likely")
    floor = "" if rate is None else f" (bytes over rate {wire['bytes_over_rate_ms']:.0f})"
    exchange = f"exchange only {result['exchange_only_ms']:.0f}{floor}"
    contended = "" if result["contended_ms"] is None else f", contended {result['contended_ms']:.0f}"
    only = f"ms: compute only {result['compute_only_ms']:.0f}, {exchange}"
    screen.print(f"{only}, bound {result['bound_ms']:.0f}{contended}")
    if result.get("parts_chosen"):
        screen.print(f"parts: {result['parts_chosen']}")
    if result["compute"] == "timed" and ranks > result["environment"]["cores"]:
        screen.print("ranks outnumber processors: products wait for their time instead of computing")
    floor = "over_load" if "over_load" in result["rows"][0] else "over_contended"
    recomputes = any("peak_without_recompute_bytes" in row for row in result["rows"])
    table = None
    for row in result["rows"]:
        step = row["step_ms"]
        cells = {name: row[name] for name in ("program", "overlap", "order")} | {
            "step ms": f"{step['median']:.0f}",
            "min–max": f"{step['min']:.0f}–{step['max']:.0f}",
            "tokens/s": f"{row['tokens_per_s']:.0f}",
            "speed-up": f"{row['speedup']:.2f}×",
            "over bound": f"{row['over_bound']:.3f}",
            "over any order": number(row.get("over_any_order"), ".3f"),
            floor.replace("_", " "): number(row.get(floor), ".3f"),
            "exposed ms": number(row["exposed_ms"], ".0f"),
            "hidden": number(row["hidden_fraction"], ".1%"),
            "predicted ms": number(row["predicted_ms"], ".0f"),
            "peak MiB": _mebibytes(row["peak_activation_bytes"]),
            "predicted MiB": _mebibytes(row.get("predicted_peak_bytes")),
        }
        if recomputes:
            cells["without"] = _mebibytes(row.get("peak_without_recompute_bytes"))
        cells["gradients"] = _gradients(row)
        table = table or plain_table(cells, ("program", "overlap", "order"), no_wrap=True)
        table.add_row(*cells.values(), style="bold" if row["default"] else None)
    screen.print(table)
    for row in result["rows"]:
        if row["tried"]:
            print_lines(screen, f"{row['program']} was tried before the rounds: {', '.join(row['tried'])}")
    if result.get("best_over_peers"):
        theirs = ", ".join(result["peers"]) if "peers" in result else "torch's"
        screen.print(f"our best is {result['best_over_peers']:.2f}× as fast as the best of {theirs}")
    advice = "measure again on a quieter machine or with more --rounds"
    print_lines(screen, *(f"error of measurement: {doubt}; {advice}" for doubt in result["doubts"]), style="bold red")


def _mebibytes(size: int | None) -> str:
    return number(None if size is None else size / 2**20, ".0f")


def _gradients(row: dict[str, Any]) -> str:
    if row["grads_equal"]:
        return "equal"
    return "not finite" if row["max_grad_diff"] is None else f"differ by {row['max_grad_diff']:.1e}"
