"""Time and memory of `overlap1f1b report` for a rank of a million events, of every kind of file.

    python benchmarks/report_scale.py [EVENTS | --page]

The trace is that of a step on a GPU: for every ten kernels a range, and for every kernel its launch, its operator and
the arrow between them, as torch.profiler writes them. Each report is a process of its own; prints its seconds, those of
the processor, and the most memory that it held. With --page: the HTML page of 64 ranks × 10 steps.
"""

from __future__ import annotations

import gzip
import json
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, NamedTuple

from overlap1f1b.cli.main import main as main_of
from overlap1f1b.plan import BlockShape, NodeCosts, Resource, compile
from overlap1f1b.schedule import Kind, build_schedule
from overlap1f1b.simulation import play_nodes

EVENTS = 1_000_000
KERNELS_PER_NODE = 10
KERNEL_US, GAP_US = 9.0, 1.0
COMPUTE, EXCHANGE = 7, 20
PROCESS, STEP_START = 4000, 4_000_000_000_000.0
REPORT = """import resource, sys
from overlap1f1b.cli.main import main
status = main(["report", sys.argv[1], "--json", sys.argv[2]])
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime, used.ru_maxrss // 1024, file=sys.stderr)
sys.exit(status)"""


class Launch(NamedTuple):
    """One kernel, with the node that it belongs to; times in microseconds."""

    node: str
    first: bool
    stream: int
    launched: float
    start: float


def launches(count: int) -> Iterator[Launch]:
    """Kernels of microbatches in turn: each exchange beside the next microbatch's compute."""
    ops = (("attention.f", COMPUTE), ("dispatch.f", EXCHANGE), ("experts.f", COMPUTE), ("combine.f", EXCHANGE))
    ends = {COMPUTE: STEP_START, EXCHANGE: STEP_START}
    for number in range(count):
        node, place = divmod(number, KERNELS_PER_NODE)
        microbatch, op = divmod(node, len(ops))
        name, stream = ops[op]
        start = ends[stream] + GAP_US
        ends[stream] = start + KERNEL_US
        launched = STEP_START + number * 2.0
        yield Launch(f"o1 {name}[0] m{microbatch}", place == 0, stream, launched, max(start, launched + 5.0))


def write_chrome(path: Path, events: int) -> None:
    """As torch.profiler does, an event a line."""
    with path.open("w") as file:
        file.write('{"schemaVersion": 1, "deviceProperties": [], "traceEvents": [\n')
        kernels = int(events / 4.1)
        labels = (("o1 rank 0: ep 0/1", -20.0), ("o1 step 1", -10.0))
        for name, offset in labels:
            add(file, "user_annotation", name, PROCESS, STEP_START + offset, 2.0 * kernels + 100.0, {})
        for number, launch in enumerate(launches(kernels), 1):
            if launch.first:
                duration = 2.0 * KERNELS_PER_NODE - 0.5
                at = launch.launched - 0.2
                add(file, "user_annotation", launch.node, PROCESS, at, duration, {"External id": number})
            link = {"External id": number, "correlation": number}
            add(file, "cpu_op", "aten::mm", PROCESS, launch.launched - 0.1, 1.5, {"External id": number})
            call = {**link, "cbid": 211}
            add(file, "cuda_runtime", "cudaLaunchKernel", PROCESS, launch.launched, 1.0, call)
            flow = {"ph": "s", "id": number, "pid": PROCESS, "tid": PROCESS, "ts": launch.launched, "cat": "ac2g"}
            file.write(json.dumps(flow | {"name": "ac2g"}) + ",\n")
            more = {"queued": 0, "device": 0, "context": 1, "stream": launch.stream, "registers per thread": 128}
            more |= {"shared memory": 49152, "blocks per SM": 1.5, "warps per SM": 12.0, "grid": [132, 1, 1]}
            more |= {"block": [256, 1, 1], "est. achieved occupancy %": 38}
            name = "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x128_32x5_nn_align8>(Params)"
            add(file, "kernel", name, 0, launch.start, KERNEL_US, link | more)
        file.write('{"name": "Record Window End", "ph": "i", "ts": 0, "s": "g"}\n], "traceName": "t.json"}\n')


def add(file: Any, category: str, name: str, pid: int, ts: float, dur: float, args: dict[str, Any]) -> None:
    """Writes one event."""
    place = {"pid": pid, "tid": PROCESS if pid else args["stream"], "ts": round(ts, 3), "dur": dur}
    file.write(json.dumps({"ph": "X", "cat": category, "name": name, **place, "args": args}) + ",\n")


def write_nsys(path: Path, events: int) -> None:
    """As nsys export does, the columns that matter."""
    kernels, process = int(events / 2.1), PROCESS << 24
    with closing(sqlite3.connect(path)) as database, database:
        database.executescript("""
            CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);
            CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT, globalTid INTEGER,
                textId INTEGER);
            CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, globalTid INTEGER,
                correlationId INTEGER);
            CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, streamId INTEGER,
                correlationId INTEGER, globalPid INTEGER, deviceId INTEGER, demangledName INTEGER);
            INSERT INTO StringIds VALUES (1, 'kernel');
        """)
        begin = round(STEP_START * 1000)
        ranges = [
            ("o1 rank 0: ep 0/1", begin - 20, kernels * 2000 + 100),
            ("o1 step 1", begin - 10, kernels * 2000 + 50),
        ]
        run, called = [], []
        for number, launch in enumerate(launches(kernels), 1):
            at = round(launch.launched * 1000)
            if launch.first:
                ranges.append((launch.node, at - 200, round(2000 * KERNELS_PER_NODE - 500)))
            start = round(launch.start * 1000)
            run.append((start, start + round(KERNEL_US * 1000), launch.stream, number, process))
            called.append((at, at + 1000, process + 1, number))
        rows = ((start, start + length, 59, text, process + 1, None) for text, start, length in ranges)
        database.executemany("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, ?, ?)", rows)
        database.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?, 0, 1)", run)
        database.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?)", called)


def write_record(path: Path, events: int) -> None:
    """As overlap1f1b profile does."""
    spans = []
    for launch in launches(events):
        start = (launch.start - STEP_START) / 1e6
        kind = "node" if launch.stream == COMPUTE else "flight"
        spans.append([kind, launch.node.removeprefix("o1 "), start, start + KERNEL_US / 1e6])
    step = {"step": 1, "seconds": spans[-1][3], "spans": spans}
    content = {"format": "overlap1f1b-spans", "version": 1, "rank": 0, "mesh": {"ep": [0, 1]}, "steps": [step]}
    path.write_text(json.dumps(content))


def page() -> None:
    """Write records of 4 pipeline ranks × 16 that share experts, and their page."""
    costs = NodeCosts.uniform(attention=3, experts=4, dispatch=5, combine=4, counts=0.5, send=1, aggregate=1)
    program = build_schedule("combined_1f1b", ranks=4, microbatches=16)
    timeline = play_nodes(compile(program, (BlockShape(1),) * 4, costs, 3), costs)
    with tempfile.TemporaryDirectory() as folder:
        for number, rank in enumerate(timeline.ranks):
            kinds = ["node" if span.node.resource is Resource.COMPUTE else "flight" for span in rank.spans]
            pairs = zip(kinds, rank.spans, strict=True)
            spans = [[kind, str(span.node), span.start / 1e3, span.end / 1e3] for kind, span in pairs]
            steps = [{"step": step, "seconds": timeline.makespan / 1e3, "spans": spans} for step in range(10)]
            kept = {Kind.F: 1e6, Kind.I: -1e6, Kind.W: 0.0}
            of_nodes = {str(node): (kept[node.kind], 2e6, 0.0) for node, *_ in rank.spans if node.microbatch == 0}
            for expert in range(16):
                place = {"rank": 16 * number + expert, "mesh": {"pp": [number, 4], "ep": [expert, 16]}}
                content = {"format": "overlap1f1b-spans", "version": 1, **place, "steps": steps}
                content["about"] = {"held": of_nodes, "parameters": 10**9}
                Path(folder, f"rank{place['rank']}.json").write_text(json.dumps(content))
        target, begin = Path(folder, "report.html"), process_time()
        main_of(["report", folder, "--html", str(target)])
        print(f"page: {target.stat().st_size / 1e6:.1f} MB, {process_time() - begin:.0f} s of processor")


def main() -> None:
    if sys.argv[1:] == ["--page"]:
        page()
        return
    events = int(sys.argv[1]) if len(sys.argv) > 1 else EVENTS
    with tempfile.TemporaryDirectory() as folder:
        files = {
            "Chrome trace": Path(folder) / "trace.json",
            "Chrome trace, gzipped": Path(folder) / "trace.json.gz",
            "nsys SQLite": Path(folder) / "trace.sqlite",
            "own record": Path(folder) / "record.json",
        }
        write_chrome(files["Chrome trace"], events)
        with files["Chrome trace"].open("rb") as plain, gzip.open(files["Chrome trace, gzipped"], "wb", 4) as packed:
            shutil.copyfileobj(plain, packed)
        write_nsys(files["nsys SQLite"], events)
        write_record(files["own record"], events)
        print(f"{events} events                  MB  seconds  of processor  peak MB  hidden")
        for kind, path in files.items():
            target = Path(folder) / "report.json"
            begin = perf_counter()
            command = [sys.executable, "-c", REPORT, str(path), str(target)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            took, (processor, peak) = perf_counter() - begin, map(float, done.stderr.split()[-2:])
            hidden = json.loads(target.read_text())["all"]["hidden_fraction"]
            size = path.stat().st_size / 1e6
            print(f"{kind:24} {size:7.1f}  {took:7.2f}  {processor:12.2f}  {peak:7.0f}  {hidden:6.1%}", flush=True)


if __name__ == "__main__":
    main()
