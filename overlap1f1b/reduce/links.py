"""What an engine lends to each of its steps: it lives as long as the engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from overlap1f1b.plan import Op
from overlap1f1b.reduce.fsdp import Gathers
from overlap1f1b.reduce.reduction import Reduction
from overlap1f1b.schedule import Kind
from overlap1f1b.transport.boundary import Boundary
from overlap1f1b.transport.devices import Watch
from overlap1f1b.transport.exchange import Exchange
from overlap1f1b.transport.failures import Failures
from overlap1f1b.transport.host import HostMemory
from overlap1f1b.transport.lanes import Lane

Lanes = dict[tuple[Op, Kind], Lane]
"""The lane of each kind of exchange, by its sub-op and direction."""


@dataclass(frozen=True)
class Links:
    """What a step needs beside its plan and its batch."""

    failures: Failures  # where ranks report that they failed; it has the limit of every wait for another rank
    exchange: Exchange  # between the ranks that share the experts
    lanes: Lanes
    rank: int = 0  # pipeline rank
    first_replica: int = 0  # the first pipeline rank with the same stages, in whose order all of them sum gradients
    boundary: Boundary | None = None
    reductions: Sequence[Reduction] = ()
    gathers: Gathers | None = None
    host: HostMemory | None = None  # carries activations to host memory and back, on lanes of its own
    watch: Watch | None = None  # clock of a device that computes while the thread goes on
    settle: Callable[[Callable[[], str]], object] = lambda pending: None  # waits for a device; told what has not ended
    fills: bool = True  # whether weight gradients may run early while a thread waits
    capacity: float | None = None  # room for rows in exchanges of equal sizes; None for exact sizes
    adds_to_main: bool = True  # whether experts' weight gradients may go to ``main_grad``
    carveout: int = 0  # thread blocks of transfers for which products leave multiprocessors alone


def lanes_of(exchange: Exchange, failures: Failures, watch: Watch | None) -> Lanes:
    """Return the lanes on which an exchange's transfers travel."""
    abort = partial(exchange.abort, ending=True)

    def lane(name: str, *, background: bool = exchange.background) -> Lane:
        return Lane(name, failures, background=background, stamp=watch and watch.stamp, abort=abort)

    back = lane("combine")
    return {
        # A few bytes: sending them takes less time than handing them to a thread. The dispatch waits for them.
        (Op.COUNTS, Kind.F): lane("counts", background=False),
        # A dispatch that waits for its counts must not hold up the others; tags keep them apart on the wire.
        (Op.DISPATCH, Kind.F): lane("dispatch"),
        (Op.COMBINE, Kind.F): back,
        (Op.COMBINE, Kind.I): back,
        (Op.DISPATCH, Kind.I): back,
    }
