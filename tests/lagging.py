"""A side stream whose jobs come late."""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from overlap1f1b.transport.loopback import LoopbackExchange
from overlap1f1b.transport.streams import Job, Mark, ThreadMark, ThreadStream


class Lagging(ThreadStream):
    """A thread that sleeps before each job, for the seconds that ``delay()`` returns."""

    def __init__(self, delay: Callable[[], float]) -> None:
        super().__init__()
        self.delay = delay

    def run(self, job: Job, *tensors: Tensor, after: Sequence[Mark] | None = None) -> ThreadMark:
        def late(*given: Tensor) -> None:
            time.sleep(self.delay())
            job(*given)

        return super().run(late, *tensors, after=after)


def loopback(delay: Callable[[], float], counts: Callable[[], float] | None = None) -> LoopbackExchange:
    """A loopback of a CPU on three such streams; ``counts`` is the delay of the third."""
    exchange = LoopbackExchange(torch.device("cpu"))
    exchange.out, exchange.back, exchange.control = Lagging(delay), Lagging(delay), Lagging(counts or delay)
    return exchange
