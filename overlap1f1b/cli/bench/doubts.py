"""Figures that cannot be right: errors of measurement, not successes."""

from __future__ import annotations

from typing import Any

LEAST_OVER_BOUND = 0.98
MOST_OFF_RATE = 0.1
MOST_OFF_PREDICTION = 0.1


def doubts(result: dict[str, Any]) -> list[str]:
    """What in the JSON of ``bench`` says that it was measured wrong, a line each.

    No step can take less time than its compute or its exchanges alone, and bytes no other time than the wire's rate.
    Timed compute that takes its time, whatever else runs, makes steps predictable; where they are not, something that
    is not timed, Python's own time first, is in short supply.
    """
    found = [
        f"{row['program']} · {row['overlap']}: over bound {row['over_bound']:.4f} is under {LEAST_OVER_BOUND}"
        for row in result["rows"]
        if row["over_bound"] < LEAST_OVER_BOUND
    ]
    took, expected = result["exchange_only_ms"], result["wire"]["bytes_over_rate_ms"]
    if expected and abs(took / expected - 1) > MOST_OFF_RATE:
        within = f"within {MOST_OFF_RATE:.0%} of bytes over rate, {expected:.0f} ms"
        found.append(f"exchange only {took:.0f} ms is not {within}")
    if result["compute"] == "timed":
        share = result.get("processor_share")
        busy = "" if share is None else f", with processors {share:.0%} busy"
        found += [line + busy for row in result["rows"] if (line := _mispredicted(row))]
    return found


def _mispredicted(row: dict[str, Any]) -> str:
    predicted, took = row["predicted_ms"], row["step_ms"]["median"]
    if predicted is None or abs(predicted / took - 1) <= MOST_OFF_PREDICTION:
        return ""
    return f"{row['program']} · {row['overlap']}: {predicted:.0f} ms were predicted of {took:.0f}"
