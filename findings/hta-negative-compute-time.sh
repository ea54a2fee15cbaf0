#!/usr/bin/env bash
# HolisticTraceAnalysis 0.5.0: a kernel of less than a microsecond has a negative duration; computing takes -9 us.
#
# Times of a trace are rounded to whole microseconds, beginnings up and ends down, since events must not overlap. A
# kernel that begins and ends within one microsecond then ends before it begins, and takes time away from the others:
# of twenty short kernels under one exchange, the breakdown says -90 % computing and 180 % not computing.
. "$(dirname "$0")/environment" --no-deps HolisticTraceAnalysis==0.5.0 pandas==3.1.1 numpy==2.4.6 plotly==7.1.0 narwhals==2.29.0 \
    networkx==3.6.1 pyyaml==6.0.4 psutil==7.2.2 python-dateutil==4.0.0 packaging==26.4
check <<'PY'
import json
from importlib.metadata import version

from hta.trace_analysis import TraceAnalysis

NCCL = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
kernels = [(NCCL, 2000.4, 10.7, 20)] + [("elementwise_kernel", 2000.6 + 0.55 * i, 0.5, 7) for i in range(20)]
events = []
for number, (name, begin, duration, stream) in enumerate(kernels, 1):
    common = {"External id": number, "correlation": number}
    cpu = {"ph": "X", "pid": 100, "tid": 100}
    events += [
        {**cpu, "cat": "cpu_op", "name": "aten::op", "ts": 1000 + 10 * number, "dur": 5, "args": common},
        {**cpu, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 1001 + 10 * number, "dur": 3, "args": common},
        {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": begin, "dur": duration,
         "args": {**common, "stream": stream, "device": 0, "context": 1}},
    ]
trace = {"schemaVersion": 1, "distributedInfo": {"rank": 0, "world_size": 1}, "traceEvents": events}
with open("rank0.json", "w") as file:
    json.dump(trace, file)
analysis = TraceAnalysis(trace_files={0: "rank0.json"}, trace_dir=".")
(breakdown,) = analysis.get_temporal_breakdown(visualize=False).to_dict("records")
print(f"HolisticTraceAnalysis {version('HolisticTraceAnalysis')}; one exchange of 10.7 us over 20 kernels of 0.5 us")
for key, value in breakdown.items():
    print(f"{key:22} {value}")
assert breakdown["compute_time(us)"] == -9 and breakdown["non_compute_time_pctg"] == 180.0, "it is another time now"
PY
