"""Steps of an engine on a world of the stand-in, and what they must show."""

import random
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from overlap1f1b.engine import Engine
from overlap1f1b.plan import NodeCosts, Overlap, compile
from overlap1f1b.schedule import AUTO, Program, build_schedule
from tests import models
from tests.device.model import Entry, Setting, Stuck, hangs, nodes_of
from tests.device.standin import World, here
from tests.engines import make

COSTS = NodeCosts.uniform(attention=3, experts=4, dispatch=5, counts=0.4, aggregate=0.2, dense=1, reduce=2, send=1)
CHUNKED = {"interleaved_1f1b": 2, "combined_1f1b": 2, "zb_h1": 2}
MICROBATCHES = {"dualpipe": {2: 4, 4: 10}, "dualpipev": {2: 5, 3: 7, 4: 9}}
LAYERS = {1: 1, 2: 3, 3: 4, 4: 5}

one_at_a_time = threading.Lock()  # seeds are of the process


class Layout(NamedTuple):
    """Ranks along the pipeline and ranks that share experts."""

    pp: int
    ep: int

    @property
    def size(self) -> int:
        return self.pp * self.ep


def program_of(name: str, pp: int, microbatches: int | None = None) -> Program:
    """A schedule, by default with a number of microbatches that the ranks do not divide, where it allows that."""
    microbatches = microbatches or MICROBATCHES.get(name, {}).get(pp, pp + 1)
    if name == AUTO:
        return build_schedule(name, ranks=pp, microbatches=microbatches, chunks=2, peak_activations=2, seconds=0.05)
    return build_schedule(name, ranks=pp, microbatches=microbatches, chunks=CHUNKED.get(name))


def mesh_of(layout: Layout) -> DeviceMesh:
    """The mesh of this rank's thread."""
    return init_device_mesh("cpu", tuple(layout), mesh_dim_names=("pp", "ep"))


def model_of(layout: Layout, mesh: DeviceMesh) -> nn.Sequential:
    """The whole model, the same on every rank."""
    with one_at_a_time:
        return models.build(mesh.get_group("ep"), layers=LAYERS[layout.pp])


def batch_of(program: Program, layout: Layout, rank: int) -> tuple[Tensor, Tensor]:
    """A rank's batch."""
    return models.batch(program.microbatches, rows=1, sequence=5, seed=rank % layout.ep)


def engine_of(
    program: Program, layout: Layout, mesh: DeviceMesh | None = None, **options: Any
) -> tuple[Engine, nn.Sequential]:
    """An engine on this rank's thread, and its model."""
    mesh = mesh or mesh_of(layout)
    model = model_of(layout, mesh)
    options = {"costs": COSTS, "overlap": 3, "timeout": 30, "mesh": mesh, "loss_fn": models.loss_fn} | options
    return make(model, program, **options), model


def stepped(
    rank: int, size: int, program: Program, layout: Layout, overlaps: Sequence[Overlap], options: dict[str, Any]
) -> tuple[list[dict[str, Tensor]], list[int]]:
    """Gradients of a step with each overlap, and where each step begins in what this rank has written down."""
    engine, model = engine_of(program, layout, **options)
    inputs, target = batch_of(program, layout, rank)
    found, begins = [], []
    for overlap in overlaps:
        if not program.search_seconds:
            engine.plan = compile(program, engine.shapes, COSTS, overlap)
        model.zero_grad()
        begins.append(len(here().log))
        engine.step(inputs, target=target)
        found.append(models.held(engine, model))
    engine.close()
    return found, begins


def every_setting(
    logs: Sequence[Sequence[Entry]], seed: int, *, maps: int, syncs: int
) -> Iterator[tuple[str, Setting]]:
    """Lazy and eager communicators; a sync at single nodes; random maps of streams to eight queues; and the worst.

    The worst is one queue for all streams and a sync before every node: it waits wherever any other setting waits, so
    what ends in it ends in all of them. The others say which condition an error needs.
    """
    source = random.Random(seed)
    places = [(rank, node) for rank, log in enumerate(logs) for node in range(nodes_of(log))]
    for lazy in (True, False):
        kind = "lazy" if lazy else "eager"
        yield kind, Setting(lazy)
        yield f"{kind}, a sync at every node, one queue", Setting(lazy, _one_queue, _always)
        for rank, node in source.sample(places, min(syncs, len(places))):
            yield f"{kind}, a sync at node {node} of rank {rank}", Setting(lazy, None, _at(rank, node))
        for number in range(maps):
            yield f"{kind}, map {number} of {seed}", Setting(lazy, _mapped(f"{seed} {number}"))


def stuck(logs: Sequence[Sequence[Entry]], seed: int = 1, *, maps: int = 1, syncs: int = 1) -> list[tuple[str, Stuck]]:
    """The first rank that hangs, for every setting in which one does; ``seed`` draws the random ones."""
    return [
        (name, found[0])
        for name, setting in every_setting(logs, seed, maps=maps, syncs=syncs)
        if (found := hangs(logs, setting))
    ]


def played(
    program: Program, layout: Layout, overlaps: Sequence[Overlap], *, watch: bool = False, **options: Any
) -> tuple[World, list[tuple[list[dict[str, Tensor]], list[int]]]]:
    """A world in which an engine has made a step with each overlap, and what :func:`stepped` says of every rank."""
    world = World(layout.size)
    with models.default_dtype(torch.float64):
        return world, world.run(stepped, program, layout, overlaps, options, watch=watch)


def _one_queue(rank: int, stream: Hashable) -> Hashable:
    return 0


def _always(rank: int, node: int) -> bool:
    return True


def _at(rank: int, node: int) -> Callable[[int, int], bool]:
    return lambda r, n: (r, n) == (rank, node)


def _mapped(seed: str) -> Callable[[int, Hashable], Hashable]:
    queues: dict[tuple[int, Hashable], int] = {}
    source = random.Random(seed)
    return lambda rank, stream: queues.setdefault((rank, stream), source.randrange(8))
