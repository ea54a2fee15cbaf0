"""The options of ``overlap1f1b plan`` and ``report``. Torch and numpy are not imported."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from overlap1f1b.schedule import AUTO, DEFAULT_CHUNKS, DEFAULT_PROGRAM, SCHEDULES
from overlap1f1b.terminal.arguments import ABOVE_0, Range, by_default, check_ranges, texts_in_a_line
from overlap1f1b.terminal.output import check_files

COST = Range(most=1e100, above=True)  # what a cost may be, so that sums are finite
COST_OR_0 = Range(most=1e100)  # costs that may be 0, if the part does not exist
PROGRAM = ("search", "schedule", "ranks", "microbatches", "chunks", "extra_warmup", "group_size", "forward_only")
"""Options that describe the program."""


@texts_in_a_line
@dataclass(frozen=True)
class ActionCosts:
    """Costs of whole actions, in one unit of time, for a rank's share of the model and one microbatch."""

    forward: Annotated[float | None, by_default("FLOAT", 1), COST] = None
    """Forward."""
    backward: Annotated[float | None, by_default("FLOAT", 2), COST] = None
    """Backward, input and weight gradients together."""
    weight: Annotated[float | None, by_default("FLOAT", "half of the backward"), COST_OR_0] = None
    """Weight gradients, a part of the backward; 0 if there are none, as with frozen weights."""
    pair: Annotated[float | None, by_default("FLOAT", 1), COST] = None
    """Time of a fused pair, as a fraction of the sum of its members."""


@texts_in_a_line
@dataclass(frozen=True)
class SubOpCosts:
    """Costs of sub-ops in every block, in one unit of time. With --layers these replace the costs of actions."""

    layers: Annotated[int | None, by_default("INT"), Range(1)] = None
    """Blocks of a rank, over all its chunks. Every sub-op is then simulated on a resource: compute, exchange or
    peer."""
    attention: Annotated[float | None, by_default("FLOAT", 3), COST] = None
    """Attention, forward; input and weight gradients cost as much each."""
    experts: Annotated[float | None, by_default("FLOAT", 4), COST] = None
    """Experts, forward; input and weight gradients cost as much each."""
    dispatch: Annotated[float | None, by_default("FLOAT", 5), COST_OR_0] = None
    """Exchange of tokens to their experts, each way; 0 if all experts are on one rank."""
    combine: Annotated[float | None, by_default("FLOAT", "as --dispatch"), COST_OR_0] = None
    """Exchange of results back, each way; 0 if all experts are on one rank."""
    counts: Annotated[float | None, by_default("FLOAT", 0), COST_OR_0] = None
    """Exchange of the numbers of tokens; 0 if its time does not matter."""
    launch: Annotated[float | None, by_default("FLOAT", 0), COST_OR_0] = None
    """Time of the host to launch a sub-op on a device, in the unit of the other costs: 0.1 if these are milliseconds
    and a launch takes 100 µs. If it is above 0, the host also waits for the numbers of tokens before it launches a
    dispatch, as on a GPU, and is drawn, too."""
    activations: Annotated[float | None, by_default("GB"), COST] = None
    """What a block's forward leaves for its backward, for one microbatch."""
    host_link: Annotated[float | None, by_default("GB/S"), COST] = None
    """Rate of the link to host memory, each way, over which --activations leave and come back; with costs in
    seconds."""
    overlap: Annotated[str | None, by_default("serial|pairs|INT", 3)] = None
    """serial, pairs, or the number of actions that may be open at once."""
    parts: Annotated[int | None, by_default("INT", 1), Range(1)] = None
    """Parts of the tokens of each call of experts, each with exchanges of its own; --experts, --dispatch and --combine
    give the times of whole calls, which are shared out evenly."""
    seconds: Annotated[float | None, by_default("FLOAT", 10), COST] = None
    """Processor time of the search of auto, with what it compiles; with --search for all of its chunks together. What
    was found by then is shown."""


@texts_in_a_line
@dataclass(frozen=True)
class PlanOutput:
    """Outputs of the plan."""

    tables: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the tables alone, without the drawing."""
    png: Annotated[Path | None, by_default("FILE")] = None
    """Draw the timeline into this file (needs matplotlib: pip install matplotlib)."""
    svg: Annotated[Path | None, by_default("FILE")] = None
    """Draw the timeline into this SVG file (needs matplotlib as well)."""
    csv: Annotated[Path | None, by_default("FILE")] = None
    """Write the program, one row a rank; --from-csv reads it."""
    trace: Annotated[Path | None, by_default("FILE")] = None
    """Write a Chrome trace, for Perfetto or chrome://tracing."""
    json: Annotated[str | None, by_default("FILE")] = None
    """File for the results as JSON, or - for standard output."""
    width: Annotated[int | None, by_default("INT", "the terminal's"), Range(20)] = None
    """Columns to draw in."""


@texts_in_a_line
@dataclass(frozen=True)
class PlanOptions:
    """Draw a schedule, simulate its time, compare it with others, or search for the fastest.

    Nothing is trained and torch is not loaded. Times have the unit of the costs. Programs have up to 5 million actions,
    or 1 million nodes with --layers: these take some minutes.

    For example
      overlap1f1b plan --schedule zb_h1 --ranks 4 --microbatches 8
      overlap1f1b plan --compare 1f1b combined_1f1b:chunks=2 dualpipe --pair 0.8
      overlap1f1b plan --layers 4 --attention 3 --experts 4 --dispatch 5 --overlap pairs --svg plan.svg
      overlap1f1b plan --layers 4 --ranks 1 --attention 1 --experts 1.3 --dispatch 1.7 --launch 0.1
      overlap1f1b plan --search --ranks 8 --microbatches 32 --peak-activations 8
      overlap1f1b plan --csv plan.csv && overlap1f1b plan --from-csv plan.csv --trace plan.json
    """

    schedule: Annotated[str | None, by_default("NAME", f"{DEFAULT_PROGRAM}, of {', '.join(SCHEDULES)}")] = None
    """Schedule to draw; with --layers also auto, an order that is found for the costs, in a loop or a V."""
    ranks: Annotated[int | None, by_default("INT", 4), Range(1)] = None
    """Pipeline ranks."""
    microbatches: Annotated[int | None, by_default("INT", 8), Range(1)] = None
    """Microbatches of a step."""
    chunks: Annotated[int | None, by_default("INT", DEFAULT_CHUNKS), Range(1)] = None
    """Stages of a rank."""
    extra_warmup: Annotated[int | None, by_default("INT", "0; 1 for combined_1f1b with one chunk on one rank")] = None
    """Additional forwards before the first backward, for schedules that take them."""
    group_size: Annotated[int | None, by_default("INT", "groups as equal as can be"), Range(1)] = None
    """Microbatches that pass one chunk before a rank turns to the next."""
    forward_only: tyro.conf.FlagCreatePairsOff[bool] = False
    """Forwards alone, as in evaluation; with --compare and --search too."""
    from_csv: Annotated[Path | None, by_default("FILE")] = None
    """Read the program from this file instead: a file of --csv or a table of torch's pipeline schedules."""
    send: Annotated[float | None, by_default("FLOAT", 0), COST_OR_0] = None
    """Time of a transfer between two ranks; 0 if it does not matter."""
    action_costs: Annotated[ActionCosts, tyro.conf.OmitArgPrefixes] = field(default_factory=ActionCosts)
    sub_op_costs: Annotated[SubOpCosts, tyro.conf.OmitArgPrefixes] = field(default_factory=SubOpCosts)
    compare: Annotated[tuple[str, ...], by_default("NAME [NAME ...]")] = ()
    """Schedules to compare it with in a table. A name may have options: combined_1f1b:chunks=2,extra_warmup=1
    (also group_size and, with --layers, overlap)."""
    search: tyro.conf.FlagCreatePairsOff[bool] = False
    """Try all schedules, chunks, extra_warmup and, with --layers, overlap for these ranks, microbatches and costs, and
    draw the fastest. Options that are given are not varied."""
    peak_activations: Annotated[float | None, by_default("FLOAT"), ABOVE_0] = None
    """Limit for --search and auto: how many microbatches' activations a rank may hold at once, over its whole share of
    the model. For auto it is by default twice the number of ranks, at least 3."""
    top: Annotated[int | None, by_default("INT", 15), Range(1)] = None
    """Rows in the table of --search; the JSON has all schedules that were played. With --layers, a schedule is not
    played if a bound shows that it cannot be among these rows or, without --top, that it cannot be the fastest."""
    output: Annotated[PlanOutput, tyro.conf.OmitArgPrefixes] = field(default_factory=PlanOutput)

    def check(self) -> None:
        """Raise ``ValueError`` for options that contradict each other."""
        check_ranges(self)
        actions, sub_ops = self.action_costs, self.sub_op_costs
        named = [f"--schedule {self.schedule}", *(f"--compare {name}" for name in self.compare)]
        auto = next((name for name in named if name.partition(" ")[2].partition(":")[0] == AUTO), None)
        if self.from_csv is not None:
            _refuse(self, PROGRAM, f"with --from-csv {self.from_csv}, which sets it; allowed: one of them")
        if sub_ops.layers is None:
            _refuse(sub_ops, vars(sub_ops), "alone; allowed: with --layers")
            if auto:
                raise ValueError(f"{auto} without --layers; allowed: with --layers, which gives costs of sub-ops")
        else:
            _refuse(actions, vars(actions), f"with --layers {sub_ops.layers}; allowed: one of them")
        _refuse(sub_ops, ("activations",) * (sub_ops.host_link is None), "alone; allowed: with --host-link")
        _refuse(sub_ops, ("host_link",) * (sub_ops.activations is None), "alone; allowed: with --activations")
        if self.forward_only:
            backward = ("backward", "weight", "pair")
            _refuse(actions, backward, "with --forward-only, which has no backward; allowed: one of them")
        whole = actions.backward or 2.0
        if actions.weight is not None and actions.weight >= whole:
            why = f"with --backward {whole:g}, which it is a part of; allowed: from 0 to below {whole:g}"
            _refuse(actions, ("weight",), why)
        if self.schedule == AUTO:
            beside = "with --schedule auto, which tries all orders; allowed: one of them"
            _refuse(self, ("extra_warmup", "group_size"), beside)
            _refuse(sub_ops, () if self.compare else ("overlap",), beside)  # schedules beside it take an overlap
        if self.search:
            _refuse(self, ("group_size", "compare"), "with --search, which tries all; allowed: one of them")
        else:
            _refuse(self, ("top",), "alone; allowed: with --search")
        if not (self.search or auto):
            _refuse(sub_ops, ("seconds",), "alone; allowed: with --search or auto")
            _refuse(self, ("peak_activations",), "alone; allowed: with --search or auto")
        if self.output.tables:
            _refuse(self.output, ("width",), "with --tables, which draws nothing; allowed: one of them")
        written = {name: getattr(self.output, name) for name in ("png", "svg", "csv", "trace", "json")}
        check_files(written, [self.from_csv] if self.from_csv else [])


def _refuse(options: object, names: Iterable[str], why: str) -> None:
    for name in names:
        if (value := getattr(options, name)) is not None and value is not False and value != ():  # 0 is given
            text = f"{value:g}" if isinstance(value, float) else " ".join(value) if name == "compare" else value
            raise ValueError(f"--{name.replace('_', '-')}{'' if value is True else f' {text}'} {why}")


PICTURES = ("png", "svg", "html", "trace")


@texts_in_a_line
@dataclass(frozen=True)
class ReportOutput:
    """Outputs of the report, beside the terminal."""

    png: Annotated[Path | None, by_default("FILE")] = None
    """Draw one step into this file, one row a lane (needs matplotlib: pip install matplotlib)."""
    svg: Annotated[Path | None, by_default("FILE")] = None
    """Draw the step into this SVG file (needs matplotlib as well)."""
    html: Annotated[Path | None, by_default("FILE")] = None
    """Write one HTML page with all steps, which can be zoomed, and the tables; it needs no other file."""
    trace: Annotated[Path | None, by_default("FILE")] = None
    """Write a Chrome trace of the step, for Perfetto, with an arrow from every exchange to its consumer."""
    step: Annotated[int | None, by_default("INT", "the last that all ranks have")] = None
    """Number of the step that is drawn; the HTML page begins with it."""
    predicted: tyro.conf.FlagCreatePairsOff[bool] = False
    """Simulate the step from the measured times of its nodes, and show the simulation beside it."""
    json: Annotated[str | None, by_default("FILE")] = None
    """File for the results as JSON, or - for standard output."""


@texts_in_a_line
@dataclass(frozen=True)
class ReportOptions:
    """Report how much of the exchange was hidden behind compute, where it was not, and what to try next.

    Reads records of overlap1f1b profile, Chrome traces of torch.profiler (also gzipped) and SQLite files of nsys
    export, one a rank; torch is not loaded. Times are milliseconds of a step.

    For example
      overlap1f1b report profile/
      overlap1f1b report rank0.record rank1.json.gz --html report.html
      overlap1f1b report --compare sequential/ overlap3/
      nsys export --type sqlite profile.nsys-rep && overlap1f1b report profile.sqlite --trace perfetto.json
    """

    files: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = ()
    """Files of one run, one a rank, or folders that hold them."""
    compare: Annotated[tuple[Path, Path] | None, by_default("A B")] = None
    """Compare two runs, each a file or a folder with one file a rank."""
    output: Annotated[ReportOutput, tyro.conf.OmitArgPrefixes] = field(default_factory=ReportOutput)

    def check(self) -> None:
        """Raise ``ValueError`` for options that contradict each other, and for files that cannot be written."""
        from overlap1f1b.profiling.reading import files_of  # loads numpy, which other verbs do not need

        output = self.output
        if self.compare is None and not self.files:
            raise ValueError("no FILE; allowed: one or more, or --compare A B")
        if self.compare is not None:
            for name in (*PICTURES, "step", "predicted"):
                if (value := getattr(output, name)) is not None and value is not False:  # step 0 is given, too
                    raise ValueError(f"--{name} with --compare; allowed: one of them")
            if self.files:
                files = " ".join(map(str, self.files))
                raise ValueError(f"{files} with --compare {' '.join(map(str, self.compare))}; allowed: one of them")
        written = {name: getattr(output, name) for name in (*PICTURES, "json")}
        check_files(written, files_of(*(self.compare or self.files)))
