"""A schedule whose order of actions is found for measured costs."""

from dataclasses import dataclass
from functools import partial
from numbers import Real

from overlap1f1b.schedule.generators.options import Schedule
from overlap1f1b.schedule.generators.sequences import one_by_one
from overlap1f1b.schedule.placement import Placement
from overlap1f1b.schedule.program import Program
from overlap1f1b.schedule.values import check_kind, check_number

AUTO = "auto"
"""Name of the programs whose order of actions is found for costs."""
SEARCH_SECONDS = 10.0
LIVE_PER_RANK, LEAST_LIVE = 2, 3
"""Live microbatches on a rank, for each rank of the pipeline and at least, if no limit is given.

``combined_1f1b`` on one rank holds three by default.
"""


def auto(
    microbatches: int, placement: Placement, peak_activations: float | None = None, seconds: float = SEARCH_SECONDS
) -> Program:
    """Return a program whose order an Engine replaces by one that is found for measured costs.

    Until then it is the order of ``sequential``, in which the engine measures them.

    >>> program = auto(4, Placement.v(2), peak_activations=3)
    >>> program.peak_activations, program.search_seconds
    ((6, 6), 10.0)

    Args:
        microbatches: Microbatches of the step.
        placement: Rank of each stage, with one pipe: a loop or a V, with any number of chunks.
        peak_activations: Limit of live activations on any rank; the unit is a rank's whole share of the model for one
            microbatch. By default twice the number of ranks, at least 3.
        seconds: Of the search; see :func:`~overlap1f1b.found_orders`.

    Raises:
        ValueError: A value is out of range, or the placement has two pipes.
    """
    limits = check_search(placement, peak_activations, seconds)
    peaks = tuple(min(limit, microbatches * len(placement.places(rank))) for rank, limit in enumerate(limits))
    return Program(
        AUTO,
        microbatches,
        one_by_one(microbatches, placement).ranks,
        peaks,
        placement,
        search_seconds=float(seconds),
        build=partial(auto, placement=placement, peak_activations=peak_activations, seconds=seconds),
    )


@dataclass(frozen=True)
class Auto(Schedule):
    """An order that is found for measured costs: in a loop, or in a V if there are chunks; see :func:`auto`."""

    chunks: int = 1
    peak_activations: float | None = None
    seconds: float = SEARCH_SECONDS

    def __post_init__(self) -> None:
        """Leave the checks to the placement and to :func:`auto`."""

    def program(self, microbatches: int, ranks: int) -> Program:
        placement = Placement.loop(ranks) if self.chunks == 1 else Placement.v(ranks, self.chunks)
        return auto(microbatches, placement, self.peak_activations, self.seconds)


def check_search(placement: Placement, peak_activations: float | None, seconds: float) -> list[int]:
    """Return the limit of live (stage, microbatch) of every rank; ValueError as of :func:`auto`."""
    check_kind("placement", placement, Placement)
    check_number("seconds", seconds, above=True)
    if len(placement.pipes) > 1:
        raise ValueError(f"a placement with {len(placement.pipes)} pipes; allowed: one pipe, a loop or a V")
    if peak_activations is None:
        peak_activations = max(LIVE_PER_RANK * placement.ranks, LEAST_LIVE)
    if not isinstance(peak_activations, Real) or not peak_activations >= 1:
        raise ValueError(f"peak_activations={peak_activations!r}; allowed: 1 or more, since a rank holds all of one")
    held = [len(placement.places(rank)) for rank in range(placement.ranks)]
    for rank, least in enumerate(held):
        if peak_activations / placement.share + 1e-9 < least:
            raise ValueError(
                f"peak_activations={peak_activations:g} with {least} stages on rank {rank}; "
                f"allowed: {least * placement.share:g} or more"
            )
    return [int(min(peak_activations / placement.share + 1e-9, 2**62)) for _ in held]
