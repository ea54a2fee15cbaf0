"""The link between two local ranks: starts them, measures it."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

from overlap1f1b.cli.doctor.finding import Finding
from overlap1f1b.cli.launch import STORE, run_ranks

ROUNDS = 50
SIZE = 2**24  # bytes each way
SLOW_MS = 5.0
SLOW_GBPS = 1.0


def link(timeout: float) -> Finding:
    """Latency and bandwidth between two ranks of this machine, both directions at once."""
    name = "link between ranks"
    with tempfile.TemporaryDirectory(prefix="overlap1f1b-") as folder:
        found = Path(folder) / "link.json"
        command = (sys.executable, "-m", "overlap1f1b.cli.doctor.link")
        status = run_ranks([str(found), str(timeout)], 2, command=command)
        measured: dict[str, Any] = {"error": f"a rank ended with status {status}"}
        if found.exists():
            measured = json.loads(found.read_text())
    if "error" in measured:
        advice = "unset GLOO_SOCKET_IFNAME or name an interface of this machine; see that ranks may open local sockets"
        return Finding(name, "fail", measured["error"], advice)
    latency, rate = measured["latency_ms"], measured["gbps"]
    value = f"{measured['backend']}: {latency:.2f} ms, {rate:.1f} Gbit/s each way"
    if latency > SLOW_MS or rate < SLOW_GBPS:
        return Finding(name, "warn", value, "other processes take the processors: measure on a quieter machine")
    return Finding(name, "ok", value)


def measure(found: Path, timeout: float) -> None:
    """What each of the ranks does; the first writes what it found, the first to fail why."""
    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    gpus = torch.cuda.device_count() >= 2
    device = torch.device("cuda", rank) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    backend = "nccl" if gpus else "gloo"
    limit = timedelta(seconds=timeout)
    store = f"file://{os.environ[STORE]}"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=2, timeout=limit)

    def exchange(tensor: torch.Tensor, into: torch.Tensor) -> float:
        dist.barrier()
        start = time.perf_counter()
        sends = dist.P2POp(dist.isend, tensor, 1 - rank), dist.P2POp(dist.irecv, into, 1 - rank)
        for work in dist.batch_isend_irecv(list(sends)):
            work.wait()
        if gpus:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    small, large = (torch.zeros(size, dtype=torch.uint8, device=device) for size in (8, SIZE))
    into = torch.empty_like(small), torch.empty_like(large)
    latency = [exchange(small, into[0]) for _ in range(ROUNDS)]
    transfer = [exchange(large, into[1]) for _ in range(5)]
    if rank == 0:
        _write(found, {"backend": backend, "latency_ms": 1e3 * median(latency), "gbps": 8e-9 * SIZE / median(transfer)})
    dist.barrier()
    dist.destroy_process_group()


def _write(found: Path, content: dict[str, object]) -> None:
    """As a whole, and only the first."""
    unfinished = found.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(content))
    if not found.exists():
        unfinished.replace(found)


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    try:
        measure(Path(sys.argv[1]), float(sys.argv[2]))
    except Exception as error:
        _write(Path(sys.argv[1]), {"error": " ".join(str(error).split())[:200]})
        os._exit(2)  # said elsewhere
    os._exit(0)
