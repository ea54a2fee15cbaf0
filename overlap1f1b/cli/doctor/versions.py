"""Versions of what is used, beside those that the tests run on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from overlap1f1b.cli.doctor.finding import Finding

TESTED: dict[str, tuple[str, str]] = {
    "torch": ("2.11", "2.14"),
    "greenlet": ("3.1", "4"),
}
"""First version that the tests run on, and the first beyond those."""
TRITON = ("3.6", "3.8")


def versions() -> Iterator[Finding]:
    """Of the libraries that everything rests on, and of CUDA, NCCL and Triton beside them."""
    for name, (first, beyond) in TESTED.items():
        yield _tested(name, first, beyond)
    yield from _cuda()
    yield _triton()


def _tested(name: str, first: str, beyond: str) -> Finding:
    wanted = _install(name, first, beyond)
    try:
        found = version(name)
    except PackageNotFoundError:
        return Finding(name, "fail", "not installed", wanted)
    if _release(first) <= _release(found) < _release(beyond):
        return Finding(name, "ok", found)
    return Finding(name, "warn", f"{found}, tested from {first} to before {beyond}", wanted)


def _release(text: str) -> tuple[int, ...]:
    """The numbers of a version, without what follows them."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()


def _cuda() -> Iterator[Finding]:
    import torch

    if torch.version.cuda is None or not torch.cuda.is_available():
        build = "built for CPU" if torch.version.cuda is None else f"built for CUDA {torch.version.cuda}"
        yield Finding("cuda", "ok", f"no GPU; torch is {build}")
        yield Finding("nccl", "ok", "not used without a GPU: ranks exchange over gloo")
        return
    advice = "the tests have run on CPU alone: compare losses with overlap1f1b train --compare"
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None
    yield Finding("cuda", "warn", f"{torch.version.cuda}, {torch.cuda.device_count()} GPUs", advice)
    if nccl is None:
        yield Finding("nccl", "fail", "not in this torch", "install a build of torch with NCCL")
    else:
        yield Finding("nccl", "warn", ".".join(map(str, nccl)), advice)


def _triton() -> Finding:
    """On a GPU kernels are Triton's; without it their twins in torch do the same, more slowly."""
    import torch

    if find_spec("triton") is not None:
        return _tested("triton", *TRITON)
    if not torch.cuda.is_available():
        return Finding("triton", "ok", "not installed: kernels have twins in torch")
    return Finding("triton", "warn", "not installed: kernels run as their twins in torch", _install("triton", *TRITON))


def _install(name: str, first: str, beyond: str) -> str:
    return f"install {name}>={first},<{beyond}"
