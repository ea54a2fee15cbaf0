"""An engine whose stages are model chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from typing import Any

from torch import Tensor

from overlap1f1b.engine import Engine
from overlap1f1b.engine.batch import Feed
from overlap1f1b.integrations.megatron.chunk import Chunk, Step
from overlap1f1b.integrations.megatron.config import agreed
from overlap1f1b.integrations.megatron.scalers import MOE, scaled
from overlap1f1b.plan import Node, NodeCosts
from overlap1f1b.schedule import Program


class ChunkEngine(Engine):
    """Plays chunks that fetch their own data and divide their own losses.

    Args:
        chunks: Of this rank, by stage.
        program: What to play.
        groups: Of this rank; those that play the same are told its costs.
        costs: Of the nodes, instead of measuring them.
        options: Of the :class:`Engine`.
    """

    def __init__(
        self,
        chunks: Mapping[int, Chunk],
        program: Program,
        *,
        groups: object,
        costs: NodeCosts | None,
        **options: Any,
    ) -> None:
        blocks = {stage: chunk.segments for stage, chunk in chunks.items()}
        self._agreement_limit = timedelta(seconds=options["timeout"])
        costs = agreed(costs, groups, self._agreement_limit)
        super().__init__(blocks, program, reduce=False, costs=costs, **options)
        self.chunks, self.groups = dict(chunks), groups
        self._auxiliary = 1.0

    @property
    def costs(self) -> NodeCosts | None:
        """As of any engine, and the same on ranks that share layers, sequences or parameters."""
        return self._plans.costs

    @costs.setter
    def costs(self, costs: NodeCosts | None) -> None:
        self._plans.costs = agreed(costs, self.groups, self._agreement_limit)

    def run(
        self,
        steps: Sequence[Step],
        around: Callable[[Node], AbstractContextManager[object]] | None,
    ) -> None:
        """Plays a step, in ``around`` at every node; None plays its forwards alone."""
        losses = steps[0].losses
        self._auxiliary = float(losses.scale_of(MOE))

        @contextmanager
        def telling(node: Node) -> Iterator[None]:
            self.chunks[node.stage].running = node.microbatch
            with ExitStack() as stack:
                if around is not None:
                    stack.enter_context(around(node))
                yield

        with ExitStack() as stepping:
            stepping.enter_context(scaled(losses.config, losses.scale_of))
            for chunk, step in zip(self.chunks.values(), steps, strict=True):
                stepping.enter_context(chunk.stepping(step))
            self.player.around = telling
            stepping.callback(setattr, self.player, "around", None)
            self.play(self._feed, grad=around is not None)

    def _feed(self) -> Feed:
        """Microbatches without inputs or targets, whose losses count as they are."""
        placement = self.program.placement

        def given(number: int, index: int) -> dict[str, Any]:
            return {
                "inputs": () if number == 0 else None,
                "loss_fn": _same if number == placement.stages - 1 else None,
            }

        return Feed(given, dict.fromkeys(range(self.program.microbatches), 1.0), self._auxiliary)


def _same(loss: Tensor) -> Tensor:
    """The chunk's forward has made the loss already."""
    return loss
