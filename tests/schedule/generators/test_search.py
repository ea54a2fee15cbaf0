"""Programs whose order is found later: their limits."""

import re
from typing import Any

import pytest

from overlap1f1b.schedule import Placement, auto, build_schedule, one_by_one


def test_until_costs_are_known_it_is_sequential() -> None:
    program = build_schedule("auto", ranks=2, microbatches=4, chunks=2, peak_activations=3, seconds=0.5)
    assert program == auto(4, Placement.v(2), 3, 0.5)
    assert program.ranks == one_by_one(4, Placement.v(2)).ranks
    assert (program.search_seconds, program.peak_activations) == (0.5, (6, 6))
    assert program.of(2) == auto(2, Placement.v(2), 3, 0.5)
    assert auto(9, Placement.loop(1)).peak_activations == (3,)  # by default two a rank, and three at least
    assert auto(9, Placement.loop(2)).peak_activations == (4, 4)
    program.check()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"peak_activations": 0.5}, "peak_activations=0.5; allowed: 1 or more, since a rank holds all of one"),
        ({"peak_activations": "x"}, "peak_activations='x'; allowed: 1 or more, since a rank holds all of one"),
        ({"seconds": 0}, "seconds=0; allowed: a finite number, more than 0"),
        ({"placement": "loop"}, "placement='loop'; allowed: Placement"),
        ({"placement": Placement.bidirectional(2)}, "a placement with 2 pipes; allowed: one pipe, a loop or a V"),
        (
            {"placement": Placement(((0, 0, 1),)), "peak_activations": 1.0},
            "peak_activations=1 with 2 stages on rank 0; allowed: 1.33333 or more",
        ),
    ],
)
def test_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        auto(**{"microbatches": 4, "placement": Placement.v(2), **changed})
