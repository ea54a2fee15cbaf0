"""Launch of a segment's exchanges."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor

import overlap1f1b as o1
from overlap1f1b.transport.exchange import LocalExchange, Transfer
from overlap1f1b.transport.streams import HostCopy, ThreadMark
from tests import models


def test_a_wait_for_counts_on_the_host_has_the_engines_limit_and_looks_for_failures() -> None:
    """Also over an exchange that was given to the engine, which knows neither."""
    asked: list[Any] = []

    class Copies(HostCopy):
        def read(self, failures: Any = None) -> Sequence[Tensor]:
            asked.append(failures)
            return self.tensors

    class OfADevice(LocalExchange):
        def counts(self, counts: Tensor, tag: int = 0, *rest: Any) -> Transfer[Tensor]:
            return Transfer(counts.view(1, -1), host=Copies([counts, counts.view(1, -1)], ThreadMark()))

    model, (x, target) = models.build(None), models.batch(2)
    engine = o1.Engine(
        model,
        o1.build_schedule("sequential", microbatches=2),
        exchange=OfADevice(),
        loss_fn=models.loss_fn,
        options=o1.EngineOptions(timeout=7),
    )
    engine.step(x, target=target)
    assert asked
    assert all(failures is engine.mesh.failures for failures in asked)
    assert engine.mesh.failures.limit == timedelta(seconds=7)
