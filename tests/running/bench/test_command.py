"""`overlap1f1b bench` as a user runs it."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from overlap1f1b.plan import row_bytes
from overlap1f1b.running.bench.command import doubts, show
from tests.cli.inside import Verb
from tests.running.run import COMMAND, Run, refused
from tests.tiers import wide

SMALL = ("--microbatches", 2, "--batch", 2, "--rounds", 1)
KEYS = {
    "program",
    "overlap",
    "default",
    "step_ms",
    "tokens_per_s",
    "exposed_ms",
    "hidden_fraction",
    "over_bound",
    "predicted_ms",
    "speedup",
    "grads_equal",
    "max_grad_diff",
    "peak_activation_bytes",
}
"""Of a row (design, 12)."""


@pytest.mark.parametrize(("ranks", "compute", "recompute"), [(1, "real", "block"), *wide((2, "timed", "none"))])
def test_every_row_is_measured_and_only_json_on_standard_output(
    text: Path, ranks: int, compute: str, recompute: str
) -> None:
    options = ("--ranks", ranks, "--compute", compute, "--recompute", recompute)
    options += ("--parts", "auto", "--layers", 1) if ranks > 1 else ()
    command = COMMAND if ranks > 1 else None  # once as a user starts it
    run = Run("bench", "--text", text, *SMALL, *options, "--json", "-", command=command, WORLD_SIZE="4")
    status, out, err = run.wait()
    assert status == 0, err
    assert "profiler" not in err
    result = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert result["environment"]["ranks"] == ranks  # whatever WORLD_SIZE a shell has left
    assert ranks == 1 or result["parts_chosen"].split()[0] in {"1", "2", "4"}
    rows = result["rows"]
    assert all(row.keys() >= KEYS for row in rows)
    assert [row["program"] for row in rows if row["default"]] == ["sequential" if ranks == 1 else "combined_1f1b+1"]
    assert len({(row["program"], row["overlap"]) for row in rows}) == len(rows) >= 6
    assert all(row["grads_equal"] and row["max_grad_diff"] == 0 for row in rows)
    assert result["bound_ms"] == max(result["compute_only_ms"], result["exchange_only_ms"]) > 0
    sent = result["wire"]["bytes_sent"]
    assert (result["wire"]["kind"], result["wire"]["rate_gbps"]) == ("loopback", None)
    assert sent == 0 if ranks == 1 else sent > 0
    assert result["workload"]["recompute"] == recompute
    for row in rows:
        if recompute != "none":
            assert 0 < row["peak_activation_bytes"] < row["peak_without_recompute_bytes"]
        assert row["over_bound"] == pytest.approx(row["step_ms"]["median"] / result["bound_ms"])
        assert row["step_ms"]["min"] <= row["step_ms"]["median"] <= row["step_ms"]["max"]
        assert f"{row['step_ms']['median']:.0f}" in err
    assert result["doubts"] == doubts(result)


@pytest.mark.wide
def test_several_stages_on_one_rank(text: Path) -> None:
    """The engine whose exchanges are answered locally splits the model as the rows do: by weight."""
    options = ("--ranks", 2, "--schedule", "interleaved_1f1b", "--chunks", 3, "--layers", 2)
    status, out, err = Run("bench", "--text", text, *SMALL, *options, "--json", "-").wait()
    assert status == 0, err
    rows = json.loads(out)["rows"]
    assert "interleaved_1f1b, 3 chunks" in {row["program"] for row in rows}
    assert all(row.keys() >= KEYS and row["grads_equal"] and row["max_grad_diff"] == 0 for row in rows)
    assert len({(row["program"], row["overlap"]) for row in rows}) == len(rows)


def shown(*found: str, **changes: Any) -> list[str]:
    """The lines of a result with one row, with these changes, and these doubts."""
    row: dict[str, Any] = dict.fromkeys(KEYS | {"over_contended"}, 1.0)
    row |= {"program": "sequential", "overlap": "1", "order": "1", "tried": []}
    row |= {"step_ms": {"min": 1.0, "median": 2.0, "max": 3.0}, "grads_equal": True, "max_grad_diff": 0.0}
    result: dict[str, Any] = {
        "environment": {"ranks": 2},
        "wire": {"kind": "loopback", "rate_gbps": None, "bytes_sent": 0},
        "compute": "real",
        "rows": [row | changes],
        "doubts": list(found),
    } | dict.fromkeys(("plain_ms", "compute_only_ms", "exchange_only_ms", "bound_ms", "contended_ms"), 1.0)
    screen = Console(width=200, file=io.StringIO(), record=True)
    show(result, screen)
    return [line.rstrip() for line in screen.export_text().splitlines()]


def test_what_is_said_of_a_row() -> None:
    assert shown()[-1].endswith("  equal")
    assert shown(grads_equal=False, max_grad_diff=0.25)[-1].endswith("  differ by 2.5e-01")
    assert shown(grads_equal=False, max_grad_diff=None)[-1].endswith("  not finite")
    tried = ["auto found: 20 ms", "combined_1f1b k=2: 21 ms"]
    said = "sequential was tried before the rounds: auto found: 20 ms, combined_1f1b k=2: 21 ms"
    assert shown(tried=tried)[-1] == said
    advice = "measure again on a quieter machine or with more --rounds"
    assert shown("this", "that")[-2:] == [f"error of measurement: {doubt}; {advice}" for doubt in ("this", "that")]


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ("--batch 6", "--batch 6 cannot be split into --microbatches 8; allowed: a multiple of 8"),
        (
            "--wire balancedfoo",
            "--wire 'balancedfoo'; allowed: a rate such as 100kbit, 500mbit or 2.5gbit (10kbit or more), balanced, "
            "or balanced*FACTOR with a factor above 0",
        ),
    ],
)
def test_options_that_no_run_can_have(capsys: pytest.CaptureFixture[str], args: str, error: str) -> None:
    assert Verb("bench").refused(capsys, *args.split()) == error


def test_a_wire_under_torchrun() -> None:
    whole = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    expected = "--wire 1gbit under torchrun; allowed: on ranks that bench starts itself"
    assert refused("bench", "--wire", "1gbit", **whole) == expected


@pytest.mark.wide
@pytest.mark.skipif(torch.__version__ < "2.12", reason="refused: torch's own V schedules cannot run on gloo")
def test_pipelines_beside_torchs(text: Path) -> None:
    sizes = ("--intermediate", 64, "--microbatches", 4, "--batch", 4)
    pipeline = ("--pp", 2, "--ep", 1, "--rounds", 1, "--peers", "--schedule", "auto", "--parts", 2)
    status, out, err = Run("bench", "--text", text, *sizes, *pipeline, "--json", "-").wait(150)
    assert status == 0, err
    result = json.loads(out)
    rows = {row["program"]: row for row in result["rows"]}
    ours = {"auto", "combined_1f1b", "combined_1f1b, 2 chunks", "zb_v, 2 chunks", "dualpipev, 2 chunks"}
    torchs = {f"torch {name}" for name in ("1F1B", "Interleaved1F1B", "ZBV", "DualPipeV")}
    assert rows.keys() == ours | torchs | {"torch DualPipeV, overlapped"}
    assert all(row.keys() >= KEYS for row in rows.values())
    assert all(row["max_grad_diff"] < 1e-6 for row in rows.values())
    assert rows["auto"]["default"]
    assert all(row["over_load"] > 0 for row in rows.values())
    best = min(row["step_ms"]["median"] for row in result["rows"] if row["program"] in ours)
    peer = min(rows[name]["step_ms"]["median"] for name in torchs)
    assert result["best_over_peers"] == pytest.approx(peer / best)


def test_one_rank_over_the_loopback(text: Path) -> None:
    """Rows go through host memory at a rate, under a capacity; it has a bound of its own and something to hide."""
    options = ("--ranks", 1, "--exchange", "loopback:0.05", "--capacity", "1.25", "--layers", 2, "--schedule", "auto")
    status, out, err = Run("bench", "--text", text, *SMALL, *options, "--json", "-").wait()
    assert status == 0, err
    result = json.loads(out)
    assert result["wire"] | {"kind": "host", "rate_gbps": 0.4} == result["wire"]
    w = result["workload"]
    row = row_bytes(w["hidden"], w["top_k"], 4, 4) + w["hidden"] * 4  # by dispatch and by combine, of each token once
    assert (
        result["wire"]["bytes_sent"] == 2 * 2 * w["batch"] * w["sequence"] * row
    )  # in two layers, forward and backward
    assert result["exchange_only_ms"] >= result["wire"]["bytes_over_rate_ms"]
    assert result["plain_ms"] is None
    assert all(row["grads_equal"] for row in result["rows"])
    assert [row["program"] for row in result["rows"] if row["default"]] == ["auto"]
    assert "through host memory at 0.05 GB/s" in err


def result(over_bound: float, exchange: float = 100.0, over_rate: float | None = None) -> dict[str, Any]:
    row = {"program": "sequential", "overlap": "1", "over_bound": over_bound}
    row |= {"predicted_ms": 100.0, "step_ms": {"median": 100.0}}
    return {
        "compute": "timed",
        "rows": [row, row | {"over_bound": 1.5}],
        "exchange_only_ms": exchange,
        "wire": {"bytes_over_rate_ms": over_rate},
    }


def test_a_step_under_its_bound() -> None:
    assert doubts(result(0.98)) == []
    assert doubts(result(0.9799)) == ["sequential · 1: over bound 0.9799 is under 0.98"]


def test_an_exchange_that_is_not_that_of_the_wire() -> None:
    assert doubts(result(1.0, 109.0, 100.0)) == doubts(result(1.0, 91.0, 100.0)) == []
    expected = ["exchange only 120 ms is not within 10% of bytes over rate, 100 ms"]
    assert doubts(result(1.0, 120.0, 100.0)) == expected
    assert doubts(result(1.0, 80.0, 100.0)) == ["exchange only 80 ms is not within 10% of bytes over rate, 100 ms"]


def test_a_step_that_was_not_predicted() -> None:
    short = result(1.0) | {"processor_share": 0.93}
    short["rows"][0] |= {"predicted_ms": 89.0}
    short["rows"][1] |= {"predicted_ms": 91.0}
    line = "sequential · 1: 89 ms were predicted of 100, with processors 93% busy"
    assert doubts(short) == [line]
    assert doubts(short | {"compute": "real"}) == []
    short["rows"][0] |= {"predicted_ms": None}
    assert doubts(short) == []
