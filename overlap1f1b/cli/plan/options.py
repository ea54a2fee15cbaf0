"""What ``overlap1f1b plan`` takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True)
class ActionCosts:
    """Costs of whole actions, in one unit of time, for a rank's share of the model and one microbatch."""

    forward: float | None = None
    """Forward; by default 1."""
    backward: float | None = None
    """Backward, input and weight gradients together; by default 2."""
    weight: float | None = None
    """Weight gradients, a part of the backward; by default half of it."""
    pair: float | None = None
    """What a fused pair takes, as a part of the sum of its members; by default 1."""
    activation: float | None = None
    """Memory of the activations of one microbatch on a rank, in any unit; adds the peak memory to the table."""
    held: float | None = None
    """Part of it that is kept between input and weight gradient; by default 1."""


@dataclass(frozen=True)
class SubOpCosts:
    """Costs of sub-ops in every block, in one unit of time. With --layers these replace the costs of actions."""

    layers: int | None = None
    """Blocks of a rank, over all its chunks: every sub-op is simulated on lanes for compute, exchange and peers."""
    attention: float | None = None
    """Attention, forward; input and weight gradients cost as much each. By default 3."""
    experts: float | None = None
    """Experts, likewise. By default 4."""
    dispatch: float | None = None
    """Exchange of tokens to their experts, each way. By default 5."""
    combine: float | None = None
    """Exchange of results back, each way. By default as --dispatch."""
    counts: float | None = None
    """Exchange of the numbers of tokens. By default 0."""
    overlap: str | None = None
    """serial, pairs, or the number of actions that may be open at once. By default 3."""


@dataclass(frozen=True)
class OutputOptions:
    """Where the plan goes."""

    png: Path | None = None
    """Draw the timeline into this file (needs matplotlib: pip install 'overlap1f1b[plot]')."""
    svg: Path | None = None
    """The same as SVG."""
    csv: Path | None = None
    """Write the program, one row a rank; --from-csv reads it."""
    trace: Path | None = None
    """Write a Chrome trace, for Perfetto or chrome://tracing."""
    json: str | None = None
    """File for the results as JSON, or - for standard output."""
    width: int | None = None
    """Columns to draw in; by default those of the terminal."""


@dataclass(frozen=True)
class PlanOptions:
    """Draw a schedule, simulate what it costs, compare it with others, or search for the fastest.

    Nothing is trained and torch is not loaded. Times have the unit of the costs.

    Examples:

      overlap1f1b plan --schedule zb_h1 --ranks 4 --microbatches 8

      overlap1f1b plan --compare 1f1b combined_1f1b:chunks=2 dualpipe --pair 0.8

      overlap1f1b plan --layers 4 --attention 3 --experts 4 --dispatch 5 --overlap pairs --svg plan.svg

      overlap1f1b plan --search --ranks 8 --microbatches 32 --memory 8

      overlap1f1b plan --csv plan.csv && overlap1f1b plan --from-csv plan.csv --trace plan.json
    """

    schedule: str | None = None
    """Schedule to draw; by default combined_1f1b. Others: sequential, afab, 1f1b, interleaved_1f1b, zb_h1, zb_h2,
    zb_v, dualpipe, dualpipev."""
    ranks: int | None = None
    """Pipeline ranks; by default 4."""
    microbatches: int | None = None
    """Microbatches of a step; by default 8."""
    chunks: int | None = None
    """Stages of a rank; by default 1."""
    extra_warmup: int | None = None
    """Further forwards before the first backward, for 1f1b, interleaved_1f1b and combined_1f1b."""
    group_size: int | None = None
    """Microbatches that pass one chunk before a rank turns to the next; by default as equal groups as can be."""
    from_csv: Path | None = None
    """Take the program from this file instead: one of --csv, or a table of torch's pipeline schedules."""
    send: float | None = None
    """Time of a transfer between two ranks; by default 0."""
    actions: Annotated[ActionCosts, tyro.conf.OmitArgPrefixes] = field(default_factory=ActionCosts)
    sub_ops: Annotated[SubOpCosts, tyro.conf.OmitArgPrefixes] = field(default_factory=SubOpCosts)
    compare: tuple[str, ...] = ()
    """Schedules to set beside it in a table. A name may carry options of its own: combined_1f1b:chunks=2,extra_warmup=1
    (also group_size and, with --layers, overlap)."""
    search: bool = False
    """Try all schedules, chunks, extra_warmup and, with --layers, overlap for these ranks, microbatches and costs, and
    draw the fastest. What is given is not varied."""
    memory: float | None = None
    """Limit for --search: activations of a rank's whole share and one microbatch that may be alive at once."""
    top: int = 15
    """Rows of the table of --search; JSON has all."""
    output: Annotated[OutputOptions, tyro.conf.OmitArgPrefixes] = field(default_factory=OutputOptions)


def check_plan(options: PlanOptions) -> None:
    """Raises ``ValueError`` for options that contradict each other."""
    if options.from_csv is not None:
        if options.search:
            raise ValueError("--from-csv with --search; allowed: one of them")
        given = ("schedule", "ranks", "microbatches", "chunks", "extra_warmup", "group_size")
        _refuse(options, given, f"--from-csv {options.from_csv}, which says it")
    if options.sub_ops.layers is None:
        names = ("attention", "experts", "dispatch", "combine", "counts", "overlap")
        _refuse(options.sub_ops, names, needed="with --layers")
    else:
        _refuse(options.actions, tuple(vars(options.actions)), f"--layers {options.sub_ops.layers}")
    if not options.search:
        _refuse(options, ("memory",), needed="with --search")
    elif options.group_size is not None:
        raise ValueError(f"--group-size {options.group_size} with --search; allowed: without, equal groups are tried")
    elif options.compare:
        raise ValueError(f"--compare {' '.join(options.compare)} with --search; allowed: one of them")
    if options.memory is not None and not 0 < options.memory < float("inf"):
        raise ValueError(f"--memory {options.memory:g}; allowed: a finite number > 0")
    if options.top < 1:
        raise ValueError(f"--top {options.top}; allowed: 1 or more")
    if options.output.width is not None and options.output.width < 20:
        raise ValueError(f"--width {options.output.width}; allowed: 20 or more")
    _check_folders(options.output)


def _refuse(options: object, names: tuple[str, ...], beside: str = "", needed: str = "") -> None:
    for name in names:
        if (value := getattr(options, name)) is not None:
            option = f"--{name.replace('_', '-')} {value}"
            raise ValueError(
                f"{option} with {beside}; allowed: one of them" if beside else f"{option} alone; allowed: {needed}"
            )


def _check_folders(output: OutputOptions) -> None:
    for name in ("png", "svg", "csv", "trace", "json"):
        value = getattr(output, name)
        if value in (None, "-"):
            continue
        if not Path(value).parent.is_dir():
            raise ValueError(f"--{name} {value}: its folder does not exist; allowed: a file in a folder that does")
        if Path(value).is_dir():
            raise ValueError(f"--{name} {value} is a folder; allowed: a file")
