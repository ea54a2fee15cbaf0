"""When a data-parallel wrapper may reduce gradients: with the last microbatch of a chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import nn

from overlap1f1b.integrations.megatron.config import Config, NoSync, Sync, each
from overlap1f1b.plan import Node, Resource
from overlap1f1b.schedule import Kind


class GradientSync:
    """Holds back reductions but for each chunk's last microbatch, whatever runs in between.

    ``no_sync_func`` is in force for a whole step, except while gradients of a last microbatch are added. With
    ``grad_sync_func`` it stays in force there too; that is called for a chunk once its gradients are complete, the rest
    of the step still to come.

    Args:
        config: Of the model.
        models: The chunks of this rank, by the number of their stage.
        nodes: Of this rank's plan.
        last: The last microbatch.
    """

    def __init__(self, config: Config, models: dict[int, nn.Module], nodes: Sequence[Node], last: int) -> None:
        self.last, self.models = last, models
        no_sync = config.no_sync_func
        self._no_sync: list[NoSync] = [] if no_sync is None else each(no_sync, 1)
        grad_sync = config.grad_sync_func
        self._grad_sync: dict[int, Sync] = {}
        if grad_sync is not None:
            self._grad_sync = dict(zip(models, each(grad_sync, len(models)), strict=True))
        backward = [node for node in nodes if node.resource is Resource.COMPUTE and node.kind is not Kind.F]
        self._ends = {node.stage: node for node in backward}
        self._held = ExitStack()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """The context of a step."""
        self._hold()
        try:
            yield
        finally:
            self._held.close()

    @contextmanager
    def around(self, node: Node) -> Iterator[None]:
        """The context of a compute node."""
        if node.kind is Kind.F or node.microbatch != self.last:
            yield
            return
        if not self._grad_sync:
            self._held.close()
        yield
        if self._grad_sync and node == self._ends[node.stage]:
            self._held.close()
            self._grad_sync[node.stage](self.models[node.stage].parameters())
        self._hold()

    def _hold(self) -> None:
        self._held.close()
        for no_sync in self._no_sync:
            self._held.enter_context(no_sync())
