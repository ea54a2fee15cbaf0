"""``overlap1f1b doctor``: what on this machine keeps exchanges from being hidden."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from overlap1f1b.running.launch import STORE, end_with, run_ranks
from overlap1f1b.schedule.values import counted
from overlap1f1b.terminal.arguments import Range, by_default, check_ranges, texts_in_a_line
from overlap1f1b.terminal.output import check_files, console, print_lines, showing, write_json
from overlap1f1b.transport.limits import DOCTOR_LIMIT_S
from overlap1f1b.transport.versions import TORCH, release

TESTED = {"torch": TORCH, "greenlet": ("3.1", "4"), "triton": ("3.6", "3.10")}
"""Of each package the first version that the tests run on, and the first one that they do not."""
SERIAL = {"connections": "CUDA_DEVICE_MAX_CONNECTIONS", "streams": "CUDA_LAUNCH_BLOCKING"}
"""Variables of the environment that, set to 1, let a GPU's streams wait for each other."""
SIZE = 2**24  # bytes each way over the link
LINK = "link between ranks"
LEAST_GBIT = 1  # a second each way; less is said to be slow
PROBE_S = 0.2  # in which two ranks do nothing but need a processor


@texts_in_a_line
@dataclass(frozen=True)
class DoctorOptions:
    """Look for problems that keep exchanges from being hidden on this machine; print one line a finding, with advice.

    The exit status is 1 if a check fails, 0 otherwise. For example
      overlap1f1b doctor
      overlap1f1b doctor --json -                          # for scripts
    """

    timeout: Annotated[float, Range(most=1_000_000, above=True)] = DOCTOR_LIMIT_S
    """Time limit, in seconds, for two local ranks that measure the link between them."""
    json: Annotated[str | None, by_default("FILE")] = None
    """File for the findings as JSON, or - for standard output."""

    def check(self) -> None:
        """Raise ``ValueError`` for values that are not allowed."""
        check_ranges(self)
        check_files({"json": self.json})


def doctor(options: DoctorOptions) -> int:
    """Check everything and return the exit status, 1 if something fails."""
    if STORE in os.environ:  # one of the two ranks that _link has started: json is the file for their figures
        end_with(lambda: _measure(Path(str(options.json)), options.timeout))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch is loaded
    screen = console(options.json)
    with showing(screen, f"measuring the link between two ranks, at most {options.timeout:g} s"):
        findings = [*_settings(), *_link(options.timeout)]
    for one in findings:
        style = {"ok": "green", "warn": "yellow", "fail": "bold red"}[one["status"]]
        line = "{status:5} {name:19} {value}  {advice}".format(**one)
        print_lines(screen, line.rstrip(), style=style)
    bad = [one["name"] for one in findings if one["status"] != "ok"]
    print_lines(screen, f"look at: {', '.join(bad)}" if bad else "all is well")
    write_json(options.json, {"findings": findings})
    return int(any(one["status"] == "fail" for one in findings))


def _finding(name: str, status: str, value: str, advice: str = "") -> dict[str, str]:
    """Return the result of a check: fail if nothing can be trained or hidden, warn if it may be so."""
    return {"name": name, "status": status, "value": value, "advice": advice}


def _settings() -> Iterator[dict[str, str]]:
    """Look at versions of packages, at the device and at variables of the environment."""
    import torch

    gpu = torch.cuda.is_available()
    for name, (first, beyond) in TESTED.items():
        found = version(name) if find_spec(name) else "not installed"
        tested = release(first) <= release(found) < release(beyond) or (name == "triton" and not gpu)
        advice = "" if tested else f"install {name}>={first},<{beyond}"
        yield _finding(name, "ok" if tested else "fail" if name == "torch" else "warn", found, advice)
    nccl = not gpu or torch.distributed.is_nccl_available()
    value = f"{counted(torch.cuda.device_count(), 'GPU')}; torch is built for {torch.version.cuda or 'CPU'}"
    yield _finding("cuda", "ok" if nccl else "fail", value, "" if nccl else "install a build of torch with NCCL")
    for name, variable in SERIAL.items():
        text, bad = os.environ.get(variable, "not set"), "fail" if gpu else "warn"
        advice = f"unset {variable} before CUDA starts: it lets streams wait for each other" if text == "1" else ""
        yield _finding(name, bad if advice else "ok", f"{variable} is {text}", advice)


def _link(timeout: float) -> list[dict[str, str]]:
    """Let two ranks, which are this command, too, measure the link between them, and their processors."""
    with TemporaryDirectory(prefix="overlap1f1b-") as folder:
        file = Path(folder, "link.json")
        status = run_ranks(["doctor", "--timeout", str(timeout), "--json", str(file)], 2, limit_s=timeout)
        if status == 128 + signal.SIGINT:
            raise KeyboardInterrupt
        if file.exists():
            return [_finding(*found) for found in json.loads(file.read_text())]
    return [_finding(LINK, "fail", f"a rank ended with status {status}", "see the lines above")]


def _measure(file: Path, timeout: float) -> int:
    """Measure the link as one of two ranks; the first rank writes the figures, or the first that fails its error."""
    import torch
    import torch.distributed as dist

    from overlap1f1b.running.ranks import SHARED, joined, lost, one_line, waited_s
    from overlap1f1b.transport import devices

    try:
        with joined((1, 1, 2), timeout) as rank:
            rows = torch.zeros(2 * SIZE, dtype=torch.uint8, device=rank.device)
            for times in (1, 5):  # the first is slower
                dist.barrier()
                start = time.perf_counter()
                for _ in range(times):
                    dist.all_to_all_single(torch.empty_like(rows), rows)
                devices.settle(rank.device)
            rate = 5 * 8e-9 * SIZE / (time.perf_counter() - start)
            waited, start = waited_s(), time.perf_counter()
            while (spun := time.perf_counter() - start) < PROBE_S:
                pass
            shared = (waited_s() - waited) / spun
            if rank.rank == 0:
                # Arguments of _finding: name, status, value, and advice where there is any.
                link = [LINK, "ok", f"{dist.get_backend()}: {rate:.1f} Gbit/s each way"]
                if rate < LEAST_GBIT:
                    link[1:] = "warn", link[-1], "bytes take long: use a quieter machine or a faster network"
                processors = ["processors", "ok", f"a rank waits for one in {shared:.0%} of the time"]
                if shared > SHARED:
                    processors[1:] = "warn", processors[-1], "they are shared: use a quieter machine"
                file.write_text(json.dumps([link, processors]))
        return 0
    except Exception as error:
        advice = f"allow more than --timeout {timeout:g}, or name an interface of this machine in GLOO_SOCKET_IFNAME"
        with suppress(FileExistsError), file.open("x") as free:
            json.dump([[LINK, "fail", lost(error) or one_line(error)[:200], advice]], free)
        return 2  # the file has the error
