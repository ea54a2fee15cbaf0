"""Steps with known answers; times in nanoseconds."""

from pathlib import Path

import pytest

from overlap1f1b.plan import Label
from overlap1f1b.profiling import Recording, figures_of, read
from tests.profiling.synthetic import AUTOGRAD, COMPUTE, EXCHANGE, LANE, PEER, Events, Kernel, Range, timed

OTHER = 30
"""A stream of somebody else's."""


def device(rank: int = 0) -> Events:
    """A step on a GPU of 919 ns: 440 of compute, 220 of exchange with 120 exposed, 260 of a bubble."""
    ranges = [
        Range(str(Label(rank, {"pp": (0, 1), "ep": (rank, 2)})), 0, 2000),
        *timed("step 4: 1–110, action 0F0: 10–70, attention.f[0] m0: 10–20, dispatch.f[0] m0: 20–40"),
        *timed("attention.f[0] m1: 40–50, experts.f[0] m0: 60–70, send.f[0] m0: 70–80, receive.b[0] m0: 80–90"),
        *timed("attention.b[0] m0: 90–100"),
        Range("ProfilerStep#4", 0, 120),
    ]
    kernels = [
        Kernel(COMPUTE, 100, 200, 12),
        Kernel(COMPUTE, 200, 220, 22),  # packs rows for the dispatch
        Kernel(EXCHANGE, 220, 420, 30),
        Kernel(EXCHANGE, 420, 440, 31, copy=True),
        Kernel(COMPUTE, 220, 320, 45),
        Kernel(COMPUTE, 440, 540, 65, AUTOGRAD),  # a thread without ranges
        Kernel(PEER, 540, 600, 72),
        Kernel(PEER, 600, 800, 82),
        Kernel(COMPUTE, 800, 900, 95),
        Kernel(COMPUTE, 900, 920, 105),  # outside all ranges
        Kernel(OTHER, 905, 915, 106),
        Kernel(COMPUTE, 1000, 1500, 300),  # after the step, as an optimizer's
    ]
    return Events(ranges, kernels)


DEVICE = {"time": 919, "compute": 440, "exchange": 220, "exposed": 120}
DEVICE_IDLE = {"order": 208, "imbalance": 0, "host": 11, "link": 0, "pipeline": 260}


def host() -> Events:
    """A step on a CPU of 100 ns: compute 50, exchanges 55 of which 32 are exposed, 6 of a bubble."""
    ranges = [
        Range(str(Label(1, {"pp": (1, 2), "ep": (0, 1)})), 0, 200),
        *timed("step 1: 0–100, receive.f[0] m0 s1: 0–1, wait receive.f[0] m0 s1: 1–7, attention.f[0] m0 s1: 7–20"),
        *timed("dispatch.f[0] m0 s1: 20–21, attention.f[0] m1 s1: 25–35"),
        *timed("experts.f[0] m0 s1: 35–60, wait dispatch.f[0] m0 s1: 38–46"),  # it waits inside itself
        *timed("reduce.w[0] m0 s1: 60–61, experts.w[0] m0 s1: 80–90"),
        *timed("flight receive.f[0] m0 s1: 1–7, flight dispatch.f[0] m0 s1: 20–40", LANE),
        *timed("flight reduce.w[0] m0 s1: 60–90", LANE),
        *timed("flight counts.f[0] m0 s1: 30–45", LANE + 1),
    ]
    return Events(ranges)


HOST = {"time": 100, "compute": 50, "exchange": 55, "exposed": 32}
HOST_IDLE = {"order": 7, "imbalance": 0, "host": 37, "link": 0, "pipeline": 6}


def summed(recording: Recording) -> dict[str, int]:
    figures = figures_of(recording)
    return {"time": figures.time, "compute": figures.compute, **figures.overlap._asdict()}


def refusal(*paths: Path) -> str:
    """What is said of files that cannot be read: one line."""
    with pytest.raises(ValueError, match=r"^[^\n]*$") as refused:
        read(*paths)
    return str(refused.value)
