"""The options of ``overlap1f1b report``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from overlap1f1b.terminal.arguments import by_default, texts_in_a_line
from overlap1f1b.terminal.output import check_files

PICTURES = ("png", "svg", "html", "trace")


@texts_in_a_line
@dataclass(frozen=True)
class OutputOptions:
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
    output: Annotated[OutputOptions, tyro.conf.OmitArgPrefixes] = field(default_factory=OutputOptions)

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
