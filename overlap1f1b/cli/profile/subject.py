"""What is profiled: an engine that has made its first steps, and how it makes the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from overlap1f1b.cli.bench.command import kind_of
from overlap1f1b.cli.bench.measure import Report
from overlap1f1b.cli.bench.variants import asked_for
from overlap1f1b.cli.options import BenchOptions, TrainOptions
from overlap1f1b.cli.profile.options import ProfileBenchOptions, ProfileTrainOptions
from overlap1f1b.cli.ranks import Rank
from overlap1f1b.cli.trainer import Trainer
from overlap1f1b.cli.workload import load_corpus
from overlap1f1b.engine import Engine
from overlap1f1b.engine.checkpoint.folder import latest
from overlap1f1b.plan import parse_overlap

Subject = tuple[Engine, Callable[[], object]]


@contextmanager
def subject(options: ProfileTrainOptions | ProfileBenchOptions, rank: Rank, report: Report) -> Iterator[Subject]:
    """The engine, its plan compiled, and a step of it."""
    if isinstance(options, TrainOptions):
        yield _training(options, rank, report)
        return
    with _benchmark(options, rank, report) as found:
        yield found


def _training(options: TrainOptions, rank: Rank, report: Report) -> Subject:
    """From the last checkpoint, if there is one; nothing is saved."""
    report("loading")
    trainer = Trainer(options, rank, load_corpus(options), options.program(), overlap=parse_overlap(options.overlap))
    checkpoint = None if options.checkpoint is None else latest(options.checkpoint)
    indices = count(0 if checkpoint is None else trainer.load(checkpoint))
    report("measuring nodes")
    while trainer.engine.costs is None:
        trainer.step(next(indices))
    return trainer.engine, lambda: trainer.step(next(indices))


@contextmanager
def _benchmark(options: BenchOptions, rank: Rank, report: Report) -> Iterator[Subject]:
    variant = asked_for(options)
    bench = kind_of(options)(options, rank, report)
    with bench.ready([variant]) as (engines, *_):
        engine = engines[variant.key]
        yield engine, lambda: bench.step(engine)
