"""``overlap1f1b doctor``: looks, prints, writes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from overlap1f1b.cli.doctor.finding import Finding
from overlap1f1b.cli.doctor.link import link
from overlap1f1b.cli.doctor.options import DoctorOptions, check_doctor
from overlap1f1b.cli.doctor.streams import connections, streams
from overlap1f1b.cli.doctor.versions import versions
from overlap1f1b.cli.output import console, write_json
from overlap1f1b.cli.wire import Wire

STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor(options: DoctorOptions) -> int:
    """Looks at everything; returns the exit status, 1 where something fails.

    Raises:
        ValueError: An option that cannot be.
    """
    check_doctor(options)
    screen = console(options.json)
    with screen.status("looking"):
        findings = list(_findings(options))
    show(findings, screen)
    write_json(options.json, {"findings": [asdict(finding) for finding in findings]})
    return int(any(finding.status == "fail" for finding in findings))


def _findings(options: DoctorOptions) -> Iterator[Finding]:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch is loaded
    yield from versions()
    import torch

    yield connections(gpu=torch.cuda.is_available())
    yield streams()
    yield link(options.timeout)
    yield wire()


def wire() -> Finding:
    """Whether ``bench --wire`` can have its link."""
    name = "shaped wire"
    try:
        with Wire(2, rate=1e9):
            pass
    except ValueError as error:
        why = str(error).removeprefix("--wire: ").removeprefix("--wire ")
        advice = "bench --wire and profile bench --wire need root, iproute2 and a kernel with tbf; all else does not"
        return Finding(name, "warn", why, advice)
    return Finding(name, "ok", "network namespaces with links limited by tbf")


def show(findings: list[Finding], screen: Console) -> None:
    """One line a finding."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(4):
        table.add_column(overflow="fold")
    for finding in findings:
        style = STYLES[finding.status]
        table.add_row(f"[{style}]{finding.status}[/]", *map(escape, (finding.name, finding.value, finding.advice)))
    screen.print(table, highlight=False)
    bad = [finding.name for finding in findings if finding.status != "ok"]
    screen.print("all is well" if not bad else f"look at: {', '.join(bad)}", highlight=False)
