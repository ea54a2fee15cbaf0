"""``overlap1f1b doctor``: checks of this machine for problems that keep exchanges from being hidden."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from overlap1f1b.running.launch import STORE, end_with, run_ranks
from overlap1f1b.running.options import WAIT
from overlap1f1b.running.wire import Wire
from overlap1f1b.terminal.arguments import by_default, check_ranges
from overlap1f1b.terminal.output import check_files, console, write_json
from overlap1f1b.terminal.status import showing
from overlap1f1b.transport.limits import DOCTOR_LIMIT_S
from overlap1f1b.transport.versions import TORCH, release

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """The result of one check: ``fail`` if training cannot work or nothing can be hidden, ``warn`` if it may be so."""

    name: str
    status: Status
    value: str
    advice: str = ""


@dataclass(frozen=True)
class DoctorOptions:
    """Look for problems that keep exchanges from being hidden on this machine; print one line a finding, with advice.

    The exit status is 1 if a check fails, 0 otherwise. For example

      overlap1f1b doctor

      overlap1f1b doctor --json -                          # for scripts
    """

    timeout: Annotated[float, WAIT] = DOCTOR_LIMIT_S
    """Time limit, in seconds, for two local ranks that measure the link between them."""
    json: Annotated[str | None, by_default("FILE")] = None
    """File for the findings as JSON, or - for standard output."""


GREENLET = ("3.1", "4")
"""The first version that the tests run on, and the first one that they do not."""
TRITON = ("3.6", "3.10")


def _tested(name: str, tested: tuple[str, str], *, other: Status = "warn", missing: Status = "fail") -> Finding:
    """Return whether a package has a tested version; ``missing`` says what it means to lack it."""
    first, beyond = tested
    wanted = f"install {name}>={first},<{beyond}"
    try:
        found = version(name)
    except PackageNotFoundError:
        value = "not installed" + ("" if missing == "fail" else ": kernels run as their twins in torch")
        return Finding(name, missing, value, "" if missing == "ok" else wanted)
    if release(first) <= release(found) < release(beyond):
        return Finding(name, "ok", found)
    return Finding(name, other, f"{found}, tested from {first} to before {beyond}", wanted)


def versions() -> Iterator[Finding]:
    """Check the versions of torch, greenlet, CUDA, NCCL and Triton."""
    import torch

    yield _tested("torch", TORCH, other="fail")  # the engine refuses another one
    yield _tested("greenlet", GREENLET)
    build = "built for CPU" if torch.version.cuda is None else f"built for CUDA {torch.version.cuda}"
    if gpu := torch.cuda.is_available():
        advice = "tried on one H100, not on several GPUs: compare losses with overlap1f1b train --compare"
        yield Finding("cuda", "warn", f"{torch.version.cuda}, {torch.cuda.device_count()} GPUs", advice)
        if torch.distributed.is_nccl_available():
            yield Finding("nccl", "warn", ".".join(map(str, torch.cuda.nccl.version())), advice)
        else:
            yield Finding("nccl", "fail", "not in this torch", "install a build of torch with NCCL")
    else:
        yield Finding("cuda", "ok", f"no GPU; torch is {build}")
        yield Finding("nccl", "ok", "not used without a GPU: ranks exchange over gloo")
    yield _tested("triton", TRITON, missing="warn" if gpu else "ok")


VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
CYCLES = 20_000_000  # of a GPU's clock: about ten milliseconds


def connections(environ: Mapping[str, str] = os.environ, *, gpu: bool) -> Finding:
    """Check that kernels of different streams do not wait for each other; with one connection they do."""
    name, text = "connections", environ.get(VARIABLE)
    if text is None:
        return Finding(name, "ok", f"{VARIABLE} is not set; CUDA's default is 8")
    value = f"{VARIABLE}={text}"
    if not text.isdecimal() or not 1 <= int(text) <= 32:
        return Finding(name, "warn", value, f"set {VARIABLE} to 8 to 32, or unset it")
    if int(text) > 1:
        return Finding(name, "ok", value)
    advice = f"unset {VARIABLE}, or set it to 8 or more before CUDA starts: one connection serialises streams"
    return Finding(name, "fail" if gpu else "warn", value, advice)


def streams() -> Finding:
    from overlap1f1b.transport import devices

    if devices.of(devices.present()) is None:
        return Finding("streams", "ok", "no GPU: exchanges travel on threads")
    one, two = (_waiting(count) for count in (1, 2))
    value = f"two streams take {two / one:.2f} times as long as one"
    if two < 1.5 * one:
        return Finding("streams", "ok", value)
    advice = f"nothing can be hidden: unset {VARIABLE} and CUDA_LAUNCH_BLOCKING, and look for others that use the GPU"
    return Finding("streams", "fail", value, advice)


def _waiting(count: int) -> float:
    """Return the milliseconds that ``count`` streams take together if each waits for the same number of cycles."""
    from overlap1f1b.transport import devices

    device, took = devices.present(), []
    gpu = devices.of(device)
    for _ in range(3):  # the first one includes the driver's start
        main = gpu.current_stream()
        begin, end = (gpu.Event(enable_timing=True) for _ in range(2))
        devices.settle(device)
        begin.record(main)
        for _ in range(count):
            stream = gpu.Stream()
            stream.wait_event(begin)
            with gpu.stream(stream):
                devices.sleep(device, CYCLES)
            main.wait_stream(stream)
        end.record(main)
        end.synchronize()
        took.append(begin.elapsed_time(end))
    return min(took)


ROUNDS = 50
SIZE = 2**24  # bytes each way


def link(timeout: float) -> Finding:
    """Measure latency and bandwidth between two ranks of this machine, both directions at once.

    The ranks are this command, too: see :func:`measure`.
    """
    name = "link between ranks"
    with tempfile.TemporaryDirectory(prefix="overlap1f1b-") as folder:
        found = Path(folder) / "link.json"
        status = run_ranks(["doctor", "--timeout", str(timeout), "--json", str(found)], 2, limit_s=timeout)
        if status == 128 + signal.SIGINT:  # Ctrl-C: no fault of the link
            raise KeyboardInterrupt
        ended = {"error": f"a rank ended with status {status}"}
        measured: dict[str, Any] = json.loads(found.read_text()) if found.exists() else ended
    if "error" in measured:
        advice = "unset GLOO_SOCKET_IFNAME or name an interface of this machine; see that ranks may open local sockets"
        # The rank that reports may be the one whose peer has reached the limit.
        if re.search("timed? ?out|by peer|broken pipe", measured["error"], re.IGNORECASE):
            advice = f"allow more than --timeout {timeout:g}; {advice}"
        return Finding(name, "fail", measured["error"], advice)
    latency, rate = measured["latency_ms"], measured["gbps"]
    value = f"{measured['backend']}: {latency:.2f} ms, {rate:.1f} Gbit/s each way"
    if latency > 5.0 or rate < 1.0:
        return Finding(name, "warn", value, "other processes take the processors: measure on a quieter machine")
    return Finding(name, "ok", value)


def measure(found: Path, timeout: float) -> int:
    """Measure the link as one of two ranks. Rank 0 writes the result, or the first rank that fails writes its error."""
    import torch
    import torch.distributed as dist

    from overlap1f1b.running.ranks import Rank, joined, lost, one_line
    from overlap1f1b.transport import devices

    def seconds(rank: Rank, size: int) -> float:
        tensor, into = (torch.zeros(size, dtype=torch.uint8, device=rank.device) for _ in range(2))
        dist.barrier()
        start = time.perf_counter()
        both = ((dist.isend, tensor), (dist.irecv, into))
        for work in dist.batch_isend_irecv([dist.P2POp(op, of, 1 - rank.rank) for op, of in both]):
            work.wait()
        devices.settle(rank.device)
        return time.perf_counter() - start

    try:
        with joined((1, 1, 2), timeout) as rank:
            latency = median(seconds(rank, 8) for _ in range(ROUNDS))
            transfer = median(seconds(rank, SIZE) for _ in range(5))
            if rank.rank == 0:
                figures = {"latency_ms": 1e3 * latency, "gbps": 8e-9 * SIZE / transfer}
                _write(found, {"backend": dist.get_backend(), **figures})
            dist.barrier()
    except Exception as error:
        _write(found, {"error": lost(error) or one_line(error)[:200]})
        return 2  # the file has the error
    return 0


def _write(found: Path, content: dict[str, object]) -> None:
    """Write the file, unless the other rank has."""
    with suppress(FileExistsError), found.open("x") as file:
        json.dump(content, file)


STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor(options: DoctorOptions) -> int:
    """Check everything and return the exit status, 1 if something fails."""
    check_ranges(options)
    check_files({"json": options.json})
    if STORE in os.environ and options.json is not None:
        found = Path(options.json)
        os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # a link that fails is one line
        end_with(lambda: measure(found, options.timeout))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch is loaded
    screen = console(options.json)
    findings: list[Finding] = []
    with showing(screen, "starting") as say:
        from overlap1f1b.transport import devices

        checks: dict[str, Callable[[], Iterable[Finding]]] = {
            "versions": versions,
            "connections": lambda: [connections(gpu=devices.of(devices.present()) is not None)],
            "streams": lambda: [streams()],
            f"link between ranks, at most {options.timeout:g} s": lambda: [link(options.timeout)],
            "shaped wire": lambda: [wire()],
        }
        for done, (name, check) in enumerate(checks.items()):
            say(f"{done} of {len(checks)} checks done, now {name}")
            findings += check()
    show(findings, screen)
    write_json(options.json, {"findings": [asdict(finding) for finding in findings]})
    return int(any(finding.status == "fail" for finding in findings))


def wire() -> Finding:
    """Check that this machine can make the link of ``bench --wire``."""
    name = "shaped wire"
    try:
        with Wire(2):  # tries a limit, too
            pass
    except ValueError as error:
        why = str(error).removeprefix("--wire: ").removeprefix("--wire ")
        advice = "bench --wire and profile bench --wire need root, iproute2 and a kernel with htb; nothing else does"
        return Finding(name, "warn", why, advice)
    return Finding(name, "ok", "network namespaces with links limited by htb")


def show(findings: list[Finding], screen: Console) -> None:
    table = Table(*(Column(overflow="fold") for _ in range(4)), box=None, pad_edge=False, show_header=False)
    for finding in findings:
        style = STYLES[finding.status]
        table.add_row(f"[{style}]{finding.status}[/]", *map(escape, (finding.name, finding.value, finding.advice)))
    screen.print(table, highlight=False)
    bad = [finding.name for finding in findings if finding.status != "ok"]
    screen.print("all is well" if not bad else f"look at: {', '.join(bad)}", highlight=False)
