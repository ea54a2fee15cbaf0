"""One step: a plan that is played over a batch. Read this file first.

played = Step(plan, make_feed, stages, links).run()

    1 begin     earlier gradients are set aside, the first receives are posted
    2 install   calls of linear layers and experts are replaced
    3 play      every node of the plan, in order
    4 finish    sums of gradients over ranks have ended
    5 result    losses, outputs, times
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from overlap1f1b.cut.stage import Stage
from overlap1f1b.plan import Plan
from overlap1f1b.plan.turn import Turns
from overlap1f1b.play.feed import Feed, Microbatches
from overlap1f1b.play.install import Installation
from overlap1f1b.play.observers import Observer, Observers, WithoutAutocast
from overlap1f1b.play.player import Player
from overlap1f1b.play.random import LoopGenerators
from overlap1f1b.play.result import StepResult, result_of
from overlap1f1b.play.times import Times
from overlap1f1b.reduce.links import Links
from overlap1f1b.reduce.reduction import Reduction
from overlap1f1b.transport.suspension import KeepsThreadState


class PlayedStep(NamedTuple):
    """A step that was played: its result, and its microbatches with their outputs and input gradients."""

    result: StepResult
    microbatches: Microbatches


@dataclass(frozen=True)
class Step:
    """A step of this rank. It may be run several times over one batch; nothing of a run lives behind it.

    Args:
        plan: What is played.
        make_feed: Makes the feed of the batch.
        stages: Of this rank, by their numbers.
        links: What the engine lends.
        grad: Whether a backward follows.
        loss_scale: Factor of the gradients that the feed gives, and of its ``aux_scale``; compared over ranks.
        observers: Who looks on.
        by_node: Whether every node is played by itself, also where blocks could be one call: they are measured.
    """

    plan: Plan
    make_feed: Callable[[], Feed]
    stages: Mapping[int, Stage]
    links: Links
    grad: bool = True
    loss_scale: float = 1.0
    observers: tuple[Observer, ...] = ()
    by_node: bool = False

    def run(self) -> PlayedStep:
        """Play the step; add its gradients to ``.grad``.

        Raises:
            LostRankError: Another rank failed, or did not answer within the limit.
        """
        links, program = self.links, self.plan.program
        every = Observers((*WithoutAutocast.here(), *self.observers))
        times = Times(self.plan.ranks[links.rank], links.watch)
        player = Player(links, times, every)
        try:
            every.begin(times)
            feed = self.make_feed()
            if not isinstance(feed, Feed):
                raise ValueError(f"a feed of type {type(feed).__name__}; allowed: a Feed")
            generators = LoopGenerators([stage.draws for stage in self.stages.values()])
            reductions = self._begin()
            aux_scale = None if feed.aux_scale is None else feed.aux_scale * self.loss_scale
            with self._install(aux_scale, every) as (turns, installations):
                if feed.draws:
                    feed = feed._replace(arguments_of=generators.watching(feed.arguments_of))
                microbatches = Microbatches(
                    installations,
                    program,
                    links.rank,
                    feed,
                    seed=generators.seed,
                    grad=self.grad,
                    loss_scale=self.loss_scale,
                )
                player.play(turns, microbatches, microbatches.begin)
            generators.end()
            ended = microbatches.of_stage(program.placement.stages - 1)
            result = result_of(ended, [feed.shares[one.index] for one in ended], times, player.alive)
            self._finish(reductions, times)
        except BaseException:
            links.failures.fail(player.place)
            every.end(failed=True)
            raise
        every.end(failed=False)
        return PlayedStep(result, microbatches)

    def _begin(self) -> Sequence[Reduction]:
        """Set gradients of earlier steps aside, and post the first receives; return the reductions of the step."""
        links, plan = self.links, self.plan
        reductions = links.reductions if self.grad else ()
        for reduction in reductions:
            reduction.begin(plan.ranks[links.first_replica])
        if links.boundary is not None:
            links.boundary.begin(plan.ranks[links.rank], plan.program.microbatches, remember=self.grad)
        return reductions

    @contextmanager
    def _install(
        self, aux_scale: float | None, observers: Observers
    ) -> Iterator[tuple[Turns, dict[int, Installation]]]:
        """Replace calls of modules."""
        links, made = self.links, dict[int, Installation]()
        with ExitStack() as inside:
            inside.enter_context(settings_of_step(next(iter(self.stages.values())).device))
            if links.carveout:
                inside.enter_context(carved_out(links.carveout))
            for number, stage in self.stages.items():
                made[number] = Installation(
                    stage,
                    self.plan.shapes[number],
                    exchange=links.exchange,
                    capacity=links.capacity,
                    adds_to_main=links.adds_to_main,
                    observers=observers,
                    offloaded=self.plan.offloads.get(number, frozenset()) if self.grad else frozenset(),
                    host=links.host,
                )
            by_node = self.by_node or observers.by_node or links.gathers is not None
            # Else the plan's turns are by what is known of the blocks.
            turns = self.plan.turns(links.rank, {} if by_node else {n: one.plain for n, one in made.items()})
            for number, one in made.items():
                inside.enter_context(one.on_modules(aux_scale, divided=number not in turns.undivided))
            yield turns, made

    def _finish(self, reductions: Iterable[Reduction], times: Times) -> None:
        """Wait for the reductions, the last to set gradients aside first; then for the device.

        A device that waits for a lost rank would let the caller wait for ever, in a call that cannot be ended.
        """
        for reduction in reversed(tuple(reductions)):
            reduction.finish()

        def pending() -> str:
            node = times.first_pending()
            return f"{'the end of the step' if node is None else node} has not ended on the device"

        self.links.settle(pending)


@contextmanager
def settings_of_step(device: torch.device) -> Iterator[None]:
    """Play nodes in the body: graphs are recorded where a node says so, and the thread's state is put back behind it.

    Backwards run on this thread: to hand each to another costs more than a launch.
    """
    with torch.autograd.set_multithreading_enabled(False), KeepsThreadState(device), torch.no_grad():
        yield


@contextmanager
def carved_out(blocks: int) -> Iterator[None]:
    """Let torch's products leave multiprocessors alone that ``blocks`` of transfers may hold, where this torch can.

    A grouped product launches one block for each multiprocessor, in clusters of two. Beside a single block of a
    transfer it runs in two waves, 1.7 times as long; if two are left alone for each such block, 1.07 times (measured
    on an H200, with 8). Its sums, and those of other products, have the same bits.
    """
    put = getattr(torch._C, "_set_sm_carveout_experimental", None)
    if put is None:
        yield
        return
    before = torch._C._get_sm_carveout_experimental()
    put(2 * blocks)
    try:
        yield
    finally:
        put(before)
