"""The pipeline of modules that run whole: those with an ``overlapped_forward_backward`` of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import nn

from overlap1f1b.integrations.dualpipe.batch import Batch, Ended
from overlap1f1b.integrations.dualpipe.walk import Walk, WeightStore
from overlap1f1b.schedule import LoweredProgram, Placement, Program, forwards_of, lower
from overlap1f1b.transport.boundary import Boundary
from overlap1f1b.transport.mesh import Mesh


class WholeModules:
    """What stays from step to step: links between ranks, and lowered programs.

    Args:
        modules: Those of this rank, by the number of their stage.
        placement: Which rank holds which stage.
        mesh: Its dimension "pp".
        overlapped: Whether pairs are given to ``type(module).overlapped_forward_backward``.
        weight_store: Where the modules leave weight gradients; then they are computed where the program has W.
        timeout: Limit in seconds of every wait for another rank.
        dynamic_shapes: Whether what passes between stages may change its sizes from step to step.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        placement: Placement,
        mesh: Mesh,
        *,
        overlapped: bool,
        weight_store: WeightStore | None,
        timeout: float,
        dynamic_shapes: bool,
    ) -> None:
        self.modules, self.mesh = dict(modules), mesh
        self.overlapped, self.weight_store = overlapped, weight_store
        parameter = next((p for module in modules.values() for p in module.parameters()), None)
        self.failures = mesh.failures
        self.boundary = Boundary(
            mesh,
            placement,
            device=torch.device("cpu") if parameter is None else parameter.device,
            timeout=timedelta(seconds=timeout),
            failures=self.failures,
            background=mesh.on_gloo,
            dynamic=dynamic_shapes,
        )
        self._failed = False
        self._remembered: Program | None = None
        self._lowered: dict[tuple[int, bool], LoweredProgram] = {}

    def run(self, program: Program, batch: Batch, *, grad: bool) -> Ended:
        """Plays a step, or its forwards alone.

        Raises:
            ValueError: Something is missing.
            RuntimeError: Another rank failed, or did not answer within the limit; a step after one that failed.
        """
        if self._failed:
            raise RuntimeError("a step of this pipeline failed before; allowed: a new one, on all ranks")
        if grad and self._remembered is not program:  # other microbatches, other sizes
            self.boundary.forget()
            self._remembered = program
        key = (program.microbatches, grad)
        if key not in self._lowered:
            self._lowered[key] = lower(program if grad else forwards_of(program))
        walk = Walk(
            self.modules,
            self.boundary,
            program,
            batch,
            overlapped=self.overlapped,
            weight_store=self.weight_store,
            grad=grad,
        )
        with self._guarded(walk):
            walk.play(self._lowered[key].ranks[self.boundary.rank])
        return walk.ended()

    @contextmanager
    def _guarded(self, walk: Walk) -> Iterator[None]:
        """A failure inside is told to the other ranks."""
        try:
            yield
        except BaseException as error:
            walk.drain()
            self.failures.tell(error, f"{self.mesh.label} failed at {walk.position}")
            self._failed = self.mesh.several
            if self._failed:
                self.mesh.abort()
            self.failures.explain(error)
            if self.weight_store is not None:
                self.weight_store.enabled = False
                self.weight_store.clear()
            raise
