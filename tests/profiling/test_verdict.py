"""What the figures say, and what to try next."""

from pathlib import Path

import pytest

from overlap1f1b.plan import About
from overlap1f1b.profiling import Figures, figures_of
from overlap1f1b.profiling.verdict import advice, verdict
from tests.profiling.synthetic import COMPUTE, EXCHANGE, PEER, Events, Kernel, Range, recorded
from tests.tiers import wide

Node = tuple[str, int, int, int, int]
"""What, stream, start and end of its kernel, launch."""


def figures(folder: Path, *nodes: Node) -> Figures:
    """Of a step of a device."""
    ranges = [Range(f"o1 {name}", launched, launched + 1) for name, *_, launched in nodes]
    kernels = [Kernel(stream, start, end, launched) for _, stream, start, end, launched in nodes]
    return figures_of(recorded(folder, Events([Range("o1 step 1", 0, 100), *ranges], kernels)))


SERIAL = (
    ("attention.f[0] m0", COMPUTE, 0, 40, 0),
    ("dispatch.f[0] m0", EXCHANGE, 40, 80, 1),
    ("experts.f[0] m0", COMPUTE, 80, 100, 2),
)
STUCK = (("attention.f[0] m1", COMPUTE, 80, 90, 1), *SERIAL[:2], ("experts.f[0] m0", COMPUTE, 90, 100, 4))


def two(begin: int, end: int, flight: tuple[int, int], last: tuple[int, int]) -> tuple[Node, ...]:
    """A dispatch beside another microbatch's attention."""
    return (
        ("attention.f[0] m1", COMPUTE, begin, end, 2),
        ("dispatch.f[0] m0", EXCHANGE, *flight, 1),
        ("experts.f[0] m0", COMPUTE, *last, 3),
    )


CASES: list[tuple[tuple[Node, ...], str, str | None]] = [
    (
        SERIAL,
        "No: 0% of the exchange was hidden; exposed exchange is 40% of a step, 100% of it in the steady phase, most in "
        "dispatch.f.",
        "one action was open at a time: overlap=3",
    ),
    *wide(
        (STUCK, "No: 0%", "see what overlap1f1b doctor says of connections"),
        (
            two(0, 40, (1, 40), (40, 50)),
            "Yes: 100% of the exchange was hidden; exposed exchange is 0.0% of a step.",
            None,
        ),
        (
            two(0, 10, (0, 40), (40, 50)),
            "In part: 25% of the exchange was hidden; exposed exchange is 60% of a step",
            "2.00 times as long",
        ),
        (  # little is lost to the lack of compute, and much to the order
            two(0, 20, (0, 40), (62, 80)),
            "In part: 50% of the exchange was hidden",
            "two actions were open at a time",
        ),
        (
            (
                ("dense.f[0] m0", COMPUTE, 0, 50, 0),
                ("receive.b[0] m0", PEER, 50, 90, 2),
                ("dense.b[0] m0", COMPUTE, 90, 100, 5),
            ),
            "Nothing was exchanged in these steps, so there was nothing to hide.",
            "the pipeline bubble is 40% of a step",
        ),
        (
            (("dense.f[0] m0", COMPUTE, 0, 40, 0), ("dense.b[0] m0", COMPUTE, 90, 100, 88)),
            "Nothing was exchanged",
            "the host issues late for 48% of a step",  # until its launch
        ),
    ),
]


@pytest.mark.parametrize(("nodes", "sentence", "tip"), CASES)
def test_verdict_and_advice(tmp_path: Path, nodes: tuple[Node, ...], sentence: str, tip: str | None) -> None:
    sums = figures(tmp_path, *nodes)
    assert verdict(sums).startswith(sentence)
    tips = advice(sums)
    assert (tip is None and tips == []) or any(tip is not None and tip in text for text in tips), tips


@pytest.mark.parametrize(
    ("about", "tip"),
    [
        (About("combined_1f1b", "pairs"), "opened by overlap=3 and one more warm-up forward (extra_warmup=1)"),
        *wide(
            (About("combined_1f1b+1", "pairs"), "opened by overlap=3"),
            (About("dualpipev", "3"), "though more were allowed: more microbatches or two chunks"),
        ),
    ],
)
def test_advice_leaves_out_what_a_run_has(tmp_path: Path, about: About, tip: str) -> None:
    sums = figures(tmp_path, *two(0, 20, (0, 40), (62, 80)))
    assert any(text.endswith(tip) for text in advice(sums, about))


def test_the_largest_loss_comes_first(tmp_path: Path) -> None:
    nodes = (*SERIAL, ("receive.b[0] m0", PEER, 100, 400, 5), ("attention.b[0] m0", COMPUTE, 400, 440, 6))
    tips = advice(figures(tmp_path, *nodes))
    assert [tip.split()[1] for tip in tips] == ["pipeline", "action"]


@pytest.mark.parametrize(("launched", "bound"), [(50, True), *wide((10, False))])
def test_a_host_that_posts_an_exchange_late_bounds_the_step(tmp_path: Path, launched: int, bound: bool) -> None:
    nodes = (
        ("attention.f[0] m0", COMPUTE, 0, 10, 0),
        ("dispatch.f[0] m0", EXCHANGE, launched, 60, launched),
        ("experts.f[0] m0", COMPUTE, 60, 100, 51),
    )
    sums = figures(tmp_path, *nodes)
    assert ("The host bounds the step: for 40% of it the device waited for a launch." in verdict(sums)) == bound
    assert verdict(sums).startswith(
        f"No: 0% of the exchange was hidden; exposed exchange is {60 - launched}% of a step"
    )
    assert any("the host issues late for 40%" in tip for tip in advice(sums)) == bound
